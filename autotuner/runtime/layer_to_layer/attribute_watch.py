"""Tensors that modules keep as attributes, and that micro-batches would take from each other."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from autotuner.errors import InputError

Kept = dict[tuple[str, str], Tensor]
"""Tensors by module and attribute."""


class AttributeWatch:
    """Watches attributes of a model's modules while its micro-batches take turns.

    A plain loop runs one micro-batch after the other, so a mask that forward keeps in an attribute is there when it is
    read. In turns, another micro-batch has put its own there by then.

    Args:
        model: whose modules are watched. What a layer keeps while it runs is its own, and no matter.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = {id(module): (name, module) for name, module in model.named_modules()}
        self._buffers = [
            (name, key, module) for name, module in model.named_modules() for key in module._buffers
            if not isinstance(module, _NormBase)  # whose statistics are only written
        ]  # fmt: skip
        self._own: set[tuple[str, str]] = set()

    @contextmanager
    def within(self, layer: nn.Module) -> Iterator[None]:
        """Leave out from now on what a layer keeps inside."""
        modules = [self._modules[id(module)] for module in layer.modules() if id(module) in self._modules]
        before = _kept(modules)
        yield
        after = _kept(modules)
        self._own.update(key for key in before.keys() | after.keys() if before.get(key) is not after.get(key))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Check that other micro-batches, which run inside, leave all attributes as they are.

        Raises:
            InputError: one does not.
        """
        before, written = _kept(self._modules.values()), self._versions()
        yield
        after = _kept(self._modules.values())
        for key, version in self._versions().items():
            if version != written.get(key) and key not in self._own:
                self._refuse(key)
        for key in (before.keys() | after.keys()) - self._own:
            one, other = before.get(key), after.get(key)
            if one is not other and not (one is not None and other is not None and _equal(one, other)):
                self._refuse(key)

    def _versions(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return what changes where a buffer is written to, or replaced."""
        found = {}
        for name, key, module in self._buffers:
            buffer = module._buffers.get(key)
            if buffer is not None:
                found[name, key] = id(buffer), buffer._version
        return found

    def _refuse(self, key: tuple[str, str]) -> None:
        raise InputError(
            f"the model keeps a tensor of one micro-batch in its attribute {'.'.join(filter(None, key))}, and layer to "
            "layer, micro-batches take turns: hand it on as an argument, give each step one micro-batch, or where it "
            "is a table that grows, run the longest micro-batch once before"
        )


def _kept(modules: Iterable[tuple[str, nn.Module]]) -> Kept:
    return {
        (name, key): value
        for name, module in modules
        for key, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
