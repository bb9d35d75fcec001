"""Lists of layers in a model."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autotuner.errors import InputError


def repeated_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a model by name: the members of its outermost lists that have several of one class.

    Raises:
        InputError: there are none, one has a parameter that is used outside of it too, or that is no plain tensor.
    """
    found: dict[str, nn.Module] = {}

    def look(name: str, module: nn.Module) -> None:
        members = list(_members(name, module))
        layers = {path for path, member in members if _is_layer(member, [each for _, each in members])}
        is_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        for path, member in members:
            if is_list and path in layers:
                found[path] = member
            else:
                look(path, member)

    look("", model)
    # Lists of convolutions with batch normalisation, as stems are, stay on the device beside other layers.
    others = {
        name: module for name, module in found.items()
        if not any(isinstance(part, _BatchNorm) for part in module.modules())
    }  # fmt: skip
    found = others or found
    if not found:
        raise InputError(
            f"{type(model).__name__} has no list of layers: an nn.ModuleList, nn.ModuleDict or nn.Sequential with two "
            "or more modules of one class, each with modules of its own"
        )
    users: dict[int, set[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        owner = next((name for name in found if path == name or path.startswith(f"{name}.")), "")
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), set()).add(owner)
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if type(parameter.data) is not Tensor or parameter.is_meta:
                kind = "has no values yet" if parameter.is_meta else f"is a {type(parameter.data).__name__}"
                raise InputError(f"{path}.{key} {kind}: layer to layer takes parameters that are plain tensors")
            shared = users.get(id(parameter), set())
            if len(shared) > 1 and shared != {""}:
                those = " and ".join(sorted(name or "the rest of the model" for name in shared))
                raise InputError(
                    f"{path}.{key} is a parameter of {those}: layer to layer, each layer has parameters of its own"
                )
    return found


def _members(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of a module, by path; of lists that cannot be called themselves, their members."""
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _members(path, child)
        else:
            yield path, child


def _is_layer(module: nn.Module, beside: Sequence[nn.Module]) -> bool:
    """Say whether a module is one of several of its class, and has modules and parameters of its own."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    has_parts = next(iter(module.children()), None) is not None
    alike = sum(type(each) is type(module) for each in beside)
    return alike > 1 and has_parts and next(iter(module.parameters()), None) is not None
