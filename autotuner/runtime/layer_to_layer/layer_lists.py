"""Lists of layers in a model."""

from torch import nn

from autotuner.errors import InputError


def repeated_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a model by name: the members of its outermost lists that have several of one class.

    Raises:
        InputError: there are none, one has a parameter that is used outside of it too, or hooks that see gradients.
    """
    found: dict[str, nn.Module] = {}

    def look(name: str, module: nn.Module) -> None:
        members = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            members = [each for each in members if not _is_layer(each[1], module)]
            found.update(
                (f"{name}.{key}" if name else key, child)
                for key, child in module.named_children() if _is_layer(child, module)
            )  # fmt: skip
        for member in members:
            look(*member)

    look("", model)
    if not found:
        raise InputError(
            f"{type(model).__name__} has no list of layers: an nn.ModuleList, nn.ModuleDict or nn.Sequential with two "
            "or more modules of one class, each with modules of its own"
        )
    users: dict[int, set[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        owner = next((name for name in found if path == name or path.startswith(f"{name}.")), "")
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            users.setdefault(id(parameter), set()).add(owner)
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise InputError(
                    f"{path}.{key} has a hook on its gradient, which is not kept where the parameter is: remove it"
                )
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            shared = users.get(id(parameter), set())
            if len(shared) > 1 and shared != {""}:
                those = " and ".join(sorted(name or "the rest of the model" for name in shared))
                raise InputError(
                    f"{path}.{key} is a parameter of {those}: layer to layer, each layer has parameters of its own"
                )
    return found


def _is_layer(module: nn.Module, within: nn.Module) -> bool:
    alike = sum(type(child) is type(module) for child in within.children())
    has_parts = next(iter(module.children()), None) is not None
    return alike > 1 and has_parts and next(iter(module.parameters()), None) is not None
