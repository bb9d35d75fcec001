"""Operators in float32 between casts from and to 16 bits, read as operators of the 16-bit type.

Kernels compute softmax and activations in float32 whatever the type, and round the result once: as the cast behind them
does. Models write such casts out, and autocast has them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotuner.ir.kinds import KINDS
from autotuner.kernels.geometry import HALVES
from autotuner.runtime.capture.program import BoundView, Operation, TensorValue, View
from autotuner.runtime.capture.regions import Uses


@dataclass(frozen=True, eq=False)
class _Chain:
    """An operator in float32 and the dropout behind it, with the casts before and behind them."""

    up: Operation
    members: tuple[Operation, ...]
    down: tuple[Operation, ...]


def narrow(operations: list[Operation], demanded: Iterable[TensorValue]) -> dict[TensorValue, TensorValue]:
    """Change operators in place, drop the casts behind them, and return what stands for the results of those.

    Args:
        operations: in order.
        demanded: tensors that are read by what is no operator of ours.
    """
    uses = Uses(operations, demanded)
    chains = [chain for each in operations if (chain := _chain(each, uses)) is not None]
    stands_for: dict[TensorValue, TensorValue] = {}
    for chain in chains:
        first, last = chain.members[0], chain.members[-1]
        (wide,), (low,) = first.inputs, chain.up.inputs
        first.inputs = (BoundView(View(low.view.tensor, wide.view.dims, wide.view.fixed), wide.renamed),)
        for member in chain.members:
            masks = [operand.view.tensor for operand in member.inputs[1:]]
            for tensor in (member.outputs[0], *masks):
                tensor.dtype = low.view.dtype
        stands_for |= {cast.outputs[0]: last.outputs[0] for cast in chain.down}
    dropped = {cast for chain in chains for cast in chain.down}
    operations[:] = [operation for operation in operations if operation not in dropped]
    for operation in operations:
        operation.inputs = tuple(
            BoundView(renamed(operand.view, stands_for), operand.renamed) for operand in operation.inputs
        )
    return stands_for


def renamed(view: View, stands_for: dict[TensorValue, TensorValue]) -> View:
    """Return the same view of the tensor that stands for the view's."""
    other = stands_for.get(view.tensor)
    return view if other is None else View(other, view.dims, view.fixed)


def _chain(first: Operation, uses: Uses) -> _Chain | None:
    """Return the casts around an operator, or None where it has to be computed in float32 as it stands."""
    if not KINDS[first.kind].computed_wide:
        return None
    up = first.inputs[0].view.tensor.made_by
    if up is None or not _is_plain_cast(up):
        return None
    low, made = up.inputs[0].view.dtype, first.outputs[0]
    if low not in HALVES or made.dtype != "float32":
        return None
    members = [first]
    while True:
        readers: Sequence[Operation] = uses.readers.get(made, [])
        if not readers or made in uses.demanded:
            return None
        if all(_is_plain_cast(reader) and reader.outputs[0].dtype == low for reader in readers):
            return _Chain(up, tuple(members), tuple(dict.fromkeys(readers)))
        (dropout, *others) = readers
        if others or dropout.kind != "dropout" or dropout.inputs[0].view.tensor is not made:
            return None
        mask = dropout.inputs[1].view.tensor
        if mask in uses.demanded or uses.readers[mask] != [dropout]:
            return None
        members.append(dropout)
        made = dropout.outputs[0]


def _is_plain_cast(operation: Operation) -> bool:
    """Say whether an operator casts a whole tensor."""
    (operand,) = operation.inputs[:1] or (None,)
    return operation.kind == "cast" and operand is not None and not operand.view.fixed and not operand.renamed
