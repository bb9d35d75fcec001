"""A layer of a model whose parameters are on the host: its bytes on the link, and its forward."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autotuner.errors import InputError
from autotuner.runtime.devices.protocol import HostLink
from autotuner.runtime.layer_to_layer.packing import Packing


class HostLayer:
    """A layer whose parameters are on the host.

    The caller's parameters stay the objects that they are, with their values on the host: an optimizer updates them,
    and `state_dict` reads them. Those that travel as they are lie in the link's buffer; of any other, the buffer has a
    rounded copy.

    Args:
        name: in the model.
        module: the layer.
        link: to the device.
        dtype: in which matrices of float32 travel, and their gradients; None for float32.

    Attributes:
        forward: the module's own, which calls go to.
        trained: the numbers of the parameters that are trained.
        weights, gradients: of all parameters, and of those that are trained, as they travel.
        own_gradients: as the optimizer takes them.
        stamp: changes whenever the values on the host have changed.
    """

    def __init__(self, name: str, module: nn.Module, link: HostLink, dtype: torch.dtype | None) -> None:
        self.name, self.module = name, module
        self.forward: Callable[..., Any] = module.forward
        places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        found: dict[int, nn.Parameter] = {}
        for part in module.modules():
            for key, parameter in part._parameters.items():
                if parameter is not None:
                    found[id(parameter)] = parameter
                    places.setdefault(id(parameter), []).append((part._parameters, key))
        self.parameters = list(found.values())
        self._places = [places[number] for number in found]
        self.trained = [number for number, each in enumerate(self.parameters) if each.requires_grad]
        self.weights = Packing.of(self.parameters, [travelling(each, dtype) for each in self.parameters])
        of_trained = [self.parameters[number] for number in self.trained]
        self.gradients = Packing.of(of_trained, [travelling(each, dtype) for each in of_trained])
        self.own_gradients = Packing.of(of_trained, [each.dtype for each in of_trained])
        self.stamp = 0
        self._link, self._buffer = link, link.host_bytes(self.weights.total_bytes)
        self._packed = self.weights.apart(self._buffer)
        self._versions = [(-1, 0)] * len(self.parameters)
        self._dtypes, self._rounds = [each.dtype for each in self.parameters], dtype
        self.refresh()

    @property
    def buffer(self) -> Tensor:
        """The bytes that go to the device."""
        return self._buffer

    def refresh(self, moved: Collection[nn.Parameter] = ()) -> None:
        """Take over what was written to the caller's parameters since, wherever they are now.

        Args:
            moved: parameters that were written to; fused optimizers do not count that as torch's operators do.
        """
        written = {id(parameter) for parameter in moved}
        changed = False
        for number, (parameter, packed) in enumerate(zip(self.parameters, self._packed, strict=True)):
            travels_as_it_is = packed.dtype == parameter.dtype
            if travels_as_it_is and parameter.data_ptr() != packed.data_ptr():
                packed.copy_(parameter.detach())
                parameter.data = packed
                changed = True
            elif not travels_as_it_is and not parameter.is_cpu:
                parameter.data = parameter.data.cpu()
            now = parameter._version, parameter.data_ptr()
            if now != self._versions[number] or id(parameter) in written:
                if not travels_as_it_is:
                    packed.copy_(parameter.detach())
                self._versions[number] = now
                changed = True
        self.stamp += changed

    @property
    def rounded(self) -> tuple[list[nn.Parameter], torch.dtype | None]:
        """The trained parameters that travel rounded, and the type that they are rounded to."""
        trained = zip(self.trained, self.gradients.dtypes, strict=True)
        found = [self.parameters[n] for n, dtype in trained if dtype != self.parameters[n].dtype]
        return found, self._rounds

    @contextmanager
    def written(self, number: int) -> Iterator[Tensor]:
        """Have a parameter that is rounded on the way written to, with the rounded copy, which this gives."""
        yield self._packed[number]
        parameter = self.parameters[number]
        self._versions[number] = parameter._version, parameter.data_ptr()

    def check(self) -> None:
        """Check that the layer has the parameters that it had when this was made.

        Raises:
            InputError: they were replaced, have another type, or other ones are trained; or one has a hook.
        """
        again = f"{self.name} has changed since the step was made: "
        if [number for number, each in enumerate(self.parameters) if each.requires_grad] != self.trained:
            raise InputError(f"{again}other parameters require a gradient. Close the step, and make a new one")
        if [each.dtype for each in self.parameters] != self._dtypes:
            raise InputError(f"{again}its parameters have another type. Close the step, and make a new one")
        for parameter, places in zip(self.parameters, self._places, strict=True):
            for own, key in places:
                if own.get(key) is not parameter:
                    raise InputError(f"{again}{key} was replaced. Close the step, and make a new one")
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise InputError(
                    f"a parameter of {self.name} has a hook on its gradient, which is not kept where the parameter is: "
                    "remove it"
                )

    def check_autocast(self, is_rounded: Callable[[torch.dtype], bool]) -> None:
        """Check that what is rounded on the way is rounded anyway.

        Args:
            is_rounded: says whether autocast of a type is on.

        Raises:
            InputError: the layer runs without autocast, or with that of another type.
        """
        if self._rounds is not None and not is_rounded(self._rounds):
            raise InputError(
                f"link_dtype={self._rounds} is for steps and evaluation under torch.autocast of that type, and "
                f"{self.name} runs without: leave link_dtype out, or run it under autocast"
            )

    def check_gradients(self) -> None:
        """Check that no gradient has come to the parameters on the host.

        Raises:
            InputError: one has: they were read otherwise than by the layer's forward.
        """
        if any(parameter.grad is not None for parameter in self.parameters):
            raise InputError(
                f"parameters of {self.name} are read outside of its forward, by the loss or another module, and "
                "layer to layer, such a gradient would be lost: train without that, or with the model on the device"
            )

    @contextmanager
    def holding(self, weights: Sequence[nn.Parameter]) -> Iterator[None]:
        """Have the module's own forward read these parameters, and not those on the host, for a while."""
        self._install(weights)
        try:
            yield
        finally:
            self._install(self.parameters)

    def _install(self, parameters: Sequence[nn.Parameter]) -> None:
        for places, parameter in zip(self._places, parameters, strict=True):
            for own, key in places:
                own[key] = parameter


def travelling(parameter: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the type in which a parameter travels: vectors, such as those of norms, go as they are."""
    return dtype if dtype is not None and parameter.dtype == torch.float32 and parameter.dim() > 1 else parameter.dtype
