"""A tuned layer inside a model that torch.compile compiles, as the operator of regions runs it.

The layer's key is no constant of the compiled code, so that layers that are compiled one by one can share it; each
place in the model where a layer is called has a number of its own.

What a mask says is not known while a model is compiled. Where it turns out to be one that no configuration covers, or
where hooks are there by then, the operator runs the original.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, NoReturn, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from autotuner.runtime.binding import Binding
from autotuner.runtime.fallbacks import Reason
from autotuner.runtime.parameter_memory import where
from autotuner.runtime.pool import Held
from autotuner.runtime.ticket import new_number

UNSEEN = ("mask", "hooks", "forward")
"""Reasons for which the original runs inside the operator: what is not looked at while a model is compiled."""


class Layer(Protocol):
    """The part of a tuned module that the operator calls."""

    original: ClassVar[type[nn.Module]]
    names: tuple[str, ...]

    def covering(self, x: Tensor, mask: Tensor | None) -> tuple[Binding, Tensor | None] | Reason: ...
    def get_parameter(self, target: str) -> nn.Parameter: ...
    def count_call(self) -> None: ...
    def count_fallback(self, reason: Reason, x: Tensor) -> None: ...
    def call_original(self, x: Tensor, mask: Tensor | None) -> Tensor: ...


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def new_place() -> int:
    """Return another number at each place where a compiled model is traced through this call."""
    return new_number()


class LayerRuns:
    """A tuned module as the operator of regions runs it; the module holds this."""

    def __init__(self, module: Any) -> None:
        self._module: ref[Any] = ref(module)

    def forward(
        self, inputs: Sequence[Tensor], parameters: Sequence[Tensor], *, in_place: bool
    ) -> tuple[list[Tensor], Held]:
        """Run a tuned module's forward, or its original's.

        Args:
            inputs: x, and a mask over keys if there is one, as the framework's forward gets them.
            parameters: the module's, in the order of its ports: what gradients are asked of.

        Raises:
            RuntimeError: the module has changed since the model was compiled, in a way that the compiler does not
                notice; or the parameters are not the module's own.
        """
        module: Layer = self._module()  # type: ignore[assignment]  # it holds this
        x, mask = inputs[0], inputs[1] if len(inputs) > 1 else None
        name = module.original.__name__
        found = module.covering(x, mask)
        if isinstance(found, Reason) and found.key not in UNSEEN:
            raise RuntimeError(
                f"a tuned {name} inside a compiled model has changed since it was compiled: {found.sentence}; compile "
                "the model anew (torch.compiler.reset())"
            )
        own = [module.get_parameter(each) for each in module.names]
        if [where(parameter) for parameter in parameters] != [where(parameter) for parameter in own]:
            raise RuntimeError(
                f"a tuned {name} inside a compiled model runs on its own parameters, and was given others: change them "
                "outside of what is compiled, and call it without functional_call"
            )
        if isinstance(found, Reason):
            module.count_fallback(found, x)
            return _original(module, x, mask, parameters)
        binding, added = found
        module.count_call()
        return binding.region.forward(binding.inputs(x, added), parameters, in_place=in_place)

    def restored(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a layer's forward leaves a ticket, which is there or gone")

    def going_back(self) -> AbstractContextManager[None]:
        return nullcontext()

    def repeated(self, *_: Any) -> NoReturn:
        raise AssertionError("a compiled model does not differentiate a layer twice")


class _OriginalGraph:
    """The autograd graph of an original that ran inside of the operator."""

    def __init__(self, y: Tensor, leaves: Sequence[Tensor]) -> None:
        self._y, self._leaves = y, leaves

    def backward(
        self,
        grads: Sequence[Tensor | None],
        wanted: tuple[bool, ...],
        keeps: bool,
        parameters: Sequence[Tensor],  # noqa: ARG002
        in_place: bool,  # noqa: ARG002
        places: Sequence[Tensor | None],  # noqa: ARG002
    ) -> list[Tensor | None]:
        """Return the wanted gradients of x and the parameters, None for others.

        Raises:
            RuntimeError: the original did not compute one of them.
        """
        asked = [leaf for leaf, want in zip(self._leaves, wanted, strict=True) if want]
        with _with_autograd():
            given = torch.autograd.grad(self._y, asked, grads[0], retain_graph=keeps, allow_unused=True)
        if any(gradient is None for gradient in given):
            raise RuntimeError("a gradient is wanted that the original did not compute: it runs on other parameters")
        found = iter(given)
        return [next(found) if want else None for want in wanted]


def _original(
    module: Layer, x: Tensor, mask: Tensor | None, parameters: Sequence[Tensor]
) -> tuple[list[Tensor], _OriginalGraph]:
    """Run the original, and keep its autograd graph for backward."""
    with _with_autograd():
        leaf = x.detach().requires_grad_(x.is_floating_point())
        y = module.call_original(leaf, mask)
    made = y.detach().clone(memory_format=torch.contiguous_format)
    return [made], _OriginalGraph(y, [leaf, *parameters])


@contextmanager
def _with_autograd() -> Iterator[None]:
    """Record an autograd graph inside an operator, where torch leaves autograd out."""
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(key, False), torch.inference_mode(False), torch.enable_grad():
        yield
