"""Masks of attention as a model gives them, in pieces and repeated, read as tensors that are computed once.

What a mask adds to scores has the axes along which it differs, and no others. So has what says which queries see a
key: one that sees none gets zeros from torch's attention, and so do the gradients that it would give.
"""

from collections.abc import Sequence
from itertools import chain, zip_longest

from autotuner.runtime.capture.additive import Layout, added_in_band, added_to_scores, seeing, total
from autotuner.runtime.capture.axes import Axis, Dim, UnknownError, extent, fresh, whole
from autotuner.runtime.capture.program import Computed, TensorValue, View, source_of
from autotuner.runtime.capture.reader import Reader, learned


def masks_of_attention(
    mask: View, queries: int, *, written_out: bool = False, in_band: bool = False
) -> tuple[View, View | None]:
    """Return what a mask adds to scores, and which of the queries see a key.

    Args:
        mask: boolean, or additive; its last dimension is that of keys.
        queries: how many there are.
        written_out: the model adds the mask and calls softmax itself: a query that sees no key gets NaN, and nothing
            says which do.
        in_band: the mask hides what is outside of a band, and some keys from all queries: what is added is without the
            former.

    Raises:
        UnknownError: keys are no dimension of it, or it is a part of a tensor.
    """
    source = source_of(mask.tensor)
    own = _axes(source)
    kept = [[axis for axis in whole(dim) if axis in own] for dim in mask.dims]
    if not kept[-1] or kept[-1] != whole(mask.dims[-1]):
        raise UnknownError("a mask whose keys are no dimension of the tensor that it comes from")
    laid_out = _layout(mask, source, [axis for dim in kept for axis in dim], [extent(dim) for dim in kept if dim])

    def held(dims: Sequence[Sequence[Axis]]) -> tuple[Dim, ...]:
        return tuple(tuple(dim) for dim in dims if dim)

    if in_band:
        adds = Computed(added_in_band, (source,), (laid_out,))
        of_keys = TensorValue(held([*kept[:-2], kept[-1]]), "bool", source.node, computed=adds)
        added = View(of_keys, (*mask.dims[:-2], (), mask.dims[-1]))
    else:
        adds = Computed(added_to_scores, (source,), (laid_out, mask.dtype, written_out))
        added = View(TensorValue(held(kept), "bool", source.node, computed=adds), mask.dims)
    if written_out:
        return added, None
    rows: list[Dim] = [*mask.dims[:-1], ()]
    seen = kept[:-1]
    if not any(seen):  # one mask for all queries of all sequences
        if queries == 1:
            raise UnknownError("a mask for one query alone")
        rows = [*fresh([queries]), ()]
        seen = [whole(rows[0])]
    says = Computed(seeing, (source,), (laid_out, mask.dtype, [extent(dim) for dim in seen if dim]))
    return added, View(TensorValue(held(seen), "bool", source.node, computed=says), tuple(rows))


def sum_of_masks(reader: Reader, one: View, other: View) -> View | None:
    """Return the sum of two masks, of which one is the same for all queries; None where it is no such sum.

    So torch adds padding, (batch * heads, 1, keys), to a mask between positions, (1, queries, keys).
    """
    views, sources = (one, other), (source_of(one.tensor), source_of(other.tensor))
    if (
        len(one.dims) != len(other.dims)
        or len(one.dims) < 2
        or bool(whole(one.dims[-2])) == bool(whole(other.dims[-2]))
    ):
        return None
    if any(source.made_by is not None for source in sources) or learned(one) or learned(other):
        return None
    for mine, theirs in zip(one.dims, other.dims, strict=True):
        if whole(mine) and whole(theirs):
            reader.axes.pairs(mine, theirs)
    owns = [_axes(source) for source in sources]
    dims: list[Dim] = []
    slots: list[list[_Slot]] = []
    for mine, theirs in zip(one.dims, other.dims, strict=True):
        of_both = [_slot(pair, owns) for pair in zip_longest(whole(mine), whole(theirs))]
        dims.append(tuple(axis for axis, _ in of_both))
        slots.append([slot for slot in of_both if any(slot[1])])
    layouts = [
        _layout(
            view, source,
            [axis for _, held in chain(*slots) if (axis := held[number]) is not None],
            [axis.extent if held[number] else 1 for axis, held in chain(*slots)],
        )
        for number, (view, source) in enumerate(zip(views, sources, strict=True))
    ]  # fmt: skip
    kept = tuple(tuple(axis for axis, _ in dim) for dim in slots if dim)
    adds = Computed(total, sources, (*layouts, [extent(dim) for dim in kept]))
    return View(TensorValue(kept, reader.dtype, sources[0].node, computed=adds), tuple(dims))


_Slot = tuple[Axis, tuple[Axis | None, ...]]
"""An axis of a sum, and that of each operand in its place, if the operand has one of its own there."""


def _slot(pair: Sequence[Axis | None], owns: Sequence[Sequence[Axis]]) -> _Slot:
    held = tuple(axis if axis in own else None for axis, own in zip(pair, owns, strict=True))
    (axis, *_) = (each for each in (*held, *pair) if each is not None)
    return axis, held


def _axes(tensor: TensorValue) -> list[Axis]:
    return whole(axis for dim in tensor.dims for axis in dim)


def _layout(view: View, source: TensorValue, wanted: Sequence[Axis], shape: Sequence[int]) -> Layout:
    """Return how a tensor becomes a view of it without what is repeated.

    Raises:
        UnknownError: the view is of a part of it.
    """
    axes = _axes(source)
    if view.fixed or sorted(map(id, wanted)) != sorted(map(id, axes)):
        raise UnknownError("a mask that is a part of the tensor that it comes from")
    return [axis.extent for axis in axes], [axes.index(axis) for axis in wanted], list(shape)
