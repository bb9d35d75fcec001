"""Memory that a captured training step reads and writes: parameters, buffers and the optimizer's state."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class StaticBytes:
    """Bytes of what is there between steps, and of gradients at the end of backward; 0 where they go on the way."""

    parameters: int
    gradients: int
    state: int

    @property
    def kept(self) -> int:
        return self.parameters + self.state


class ModelMemory:
    """Addresses of a model's tensors, noted once and compared before each step.

    Of the optimizer's state, only the containers are looked at: `load_state_dict` replaces them.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self.note()

    def note(self) -> None:
        """Note where everything is now."""
        self._modules = list(self._model.modules())
        self._tensors: list[tuple[dict[str, Any], str, Tensor, int]] = []
        self._others: list[tuple[dict[str, Any], str, Any]] = []
        self._sizes: list[tuple[dict[str, Any], int]] = []
        for module in self._modules:
            for own in (module._parameters, module._buffers, module._modules):
                named: dict[str, Any] = own
                self._sizes.append((named, len(named)))
                for name, value in named.items():
                    if isinstance(value, Tensor):
                        self._tensors.append((named, name, value, value.data_ptr()))
                    else:
                        self._others.append((named, name, value))
        self._parameters = [parameter for _, _, parameter, _ in self._tensors if isinstance(parameter, nn.Parameter)]
        self._state, self._stateful = self._optimizer.state, set(self._optimizer.state)
        self._groups = self._optimizer.param_groups

    def has_moved(self) -> bool:
        """Say whether a module, a tensor or the optimizer's state was replaced since, or has other memory."""
        optimizer = self._optimizer
        return (
            optimizer.state is not self._state
            or len(optimizer.state) != len(self._stateful)
            or optimizer.param_groups is not self._groups
            or any(len(own) != size for own, size in self._sizes)
            or any(own.get(name) is not value for own, name, value in self._others)
            or self.has_tensors_elsewhere()
        )

    def has_tensors_elsewhere(self) -> bool:
        """Say whether a parameter or a buffer was replaced since, or has other memory."""
        return any(own.get(n) is not tensor or tensor.data_ptr() != at for own, n, tensor, at in self._tensors)

    def new_state(self) -> list[Tensor]:
        """Return the optimizer's state of parameters that had none when it was noted, but what is a parameter itself.

        That of others stays where it is: graphs may read and write it there.
        """
        state = self._optimizer.state
        if state is not self._state or len(state) == len(self._stateful):
            return []
        own = {tensor.untyped_storage().data_ptr() for _, _, tensor, _ in self._tensors}
        made = [value for key, kept in state.items() if key not in self._stateful for value in kept.values()]
        tensors = {id(value): value for value in made if type(value) is Tensor}.values()
        return [value for value in tensors if value.untyped_storage().data_ptr() not in own]

    def static_bytes(self, *, frees_gradients: bool = False) -> StaticBytes:
        """Return the bytes of what is there between steps, and of all gradients.

        Args:
            frees_gradients: backward lets gradients go before all are there.
        """
        state = [value for own in self._optimizer.state.values() for value in own.values() if isinstance(value, Tensor)]
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        own = {tensor.data_ptr(): tensor for _, _, tensor, _ in self._tensors}
        return StaticBytes(
            sum(tensor.nbytes for tensor in own.values()),
            0 if frees_gradients else sum(tensor.nbytes for tensor in {id(each): each for each in trained}.values()),
            sum(tensor.nbytes for tensor in state),
        )

    def put_back(self) -> None:
        """Have modules hold the tensors again that they had: those of a capture were never computed."""
        for own, size in self._sizes:
            if len(own) != size:
                kept = {name for named, name, *_ in (*self._tensors, *self._others) if named is own}
                for name in own.keys() - kept:
                    del own[name]
        for own, name, tensor, _ in self._tensors:
            own[name] = tensor
        for own, name, value in self._others:
            own[name] = value

    def modes(self) -> Hashable:
        """Return the modes of all modules, and which parameters want gradients."""
        return (
            tuple([module.training for module in self._modules]),
            tuple([parameter.requires_grad for parameter in self._parameters]),
        )
