"""Views of tensors, as torch's calls make them: they cost nothing, and make no operator."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autotuner.runtime.capture.axes import Dim, UnknownError, are_shuffled, extent, fresh, whole
from autotuner.runtime.capture.deferred import is_named
from autotuner.runtime.capture.program import Computed, Expression, TensorValue, View
from autotuner.runtime.capture.reader import RULES, Reader, aten, held, rule
from autotuner.runtime.capture.sinks import WEIGHTS, without_sinks
from autotuner.runtime.capture.written_out import uncast


@rule(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.view_copy.default)
def _view(reader: Reader, x: View, shape: Sequence[int]) -> View:
    return _seen(x, reader.axes.regrouped(x.dims, _known(shape, x.dims)))


def _seen(x: View, dims: tuple[Dim, ...]) -> View:
    """Return a view with these dimensions.

    Raises:
        UnknownError: it makes one dimension of several of a tensor that comes from outside, as of the rows and columns
            of an image. The view is then what comes from outside, and its positions are one axis. Or it cuts an image
            into windows, or puts it together again: that is a copy, so that the positions of a window are one axis, as
            kernels of attention want them.
    """
    tensor, own = x.tensor, set(held(x))  # what it only repeats, as a mask for all heads, is none of its positions
    if tensor.made_by is None and not tensor.parameter and any(len(own.intersection(whole(dim))) > 1 for dim in dims):
        raise UnknownError("a view that merges dimensions of what is no result of ours")
    if any(are_shuffled(dim, held(x)) for dim in dims):
        raise UnknownError("a view that shuffles parts of two dimensions, as windows of an image do")
    return View(tensor, dims, x.fixed)


def _known(shape: Sequence[int], dims: Sequence[Dim]) -> list[int]:
    """Return a shape with the extent for which -1 stands."""
    known = math.prod(size for size in shape if size != -1)
    elements = extent(axis for dim in dims for axis in whole(dim))
    if not known:
        raise UnknownError("a view of no elements")
    return [elements // known if size == -1 else size for size in shape]


@rule(aten.flatten.using_ints)
def _flatten(reader: Reader, x: View, start: int = 0, end: int = -1) -> View:  # noqa: ARG001
    if not x.dims:
        return View(x.tensor, ((),), x.fixed)
    first, last = start % len(x.dims), end % len(x.dims)
    merged = tuple(axis for dim in x.dims[first : last + 1] for axis in dim)
    return _seen(x, (*x.dims[:first], merged, *x.dims[last + 1 :]))


@rule(aten.unflatten.int)
def _unflatten(reader: Reader, x: View, dim: int, sizes: Sequence[int]) -> View:
    place = dim % len(x.dims)
    made = reader.axes.regrouped([x.dims[place]], _known(sizes, [x.dims[place]]))
    return View(x.tensor, (*x.dims[:place], *made, *x.dims[place + 1 :]), x.fixed)


@rule(aten.transpose.int, aten.swapaxes.default)
def _transpose(reader: Reader, x: View, one: int, other: int) -> View:  # noqa: ARG001
    dims = list(x.dims)
    dims[one], dims[other] = dims[other], dims[one]
    return View(x.tensor, tuple(dims), x.fixed)


@rule(aten.t.default, aten.numpy_T.default)
def _t(reader: Reader, x: View) -> View:  # noqa: ARG001
    return View(x.tensor, x.dims[::-1], x.fixed)


@rule(aten.permute.default)
def _permute(reader: Reader, x: View, order: Sequence[int]) -> View:  # noqa: ARG001
    return View(x.tensor, tuple(x.dims[place] for place in order), x.fixed)


@rule(aten.unsqueeze.default)
def _unsqueeze(reader: Reader, x: View, dim: int) -> View:  # noqa: ARG001
    place = dim % (len(x.dims) + 1)
    return View(x.tensor, (*x.dims[:place], (), *x.dims[place:]), x.fixed)


@rule(aten.squeeze.dim)
def _squeeze(reader: Reader, x: View, dim: int) -> View:  # noqa: ARG001
    place = dim % len(x.dims)
    if x.dims[place]:
        return x
    return View(x.tensor, (*x.dims[:place], *x.dims[place + 1 :]), x.fixed)


@rule(aten.expand.default)
def _expand(reader: Reader, x: View, shape: Sequence[int], *, implicit: bool = False) -> View:  # noqa: ARG001
    own = ((),) * (len(shape) - len(x.dims)) + x.dims
    dims = tuple(
        dim if wanted in (-1, extent(whole(dim))) else fresh([wanted])[0]
        for dim, wanted in zip(own, shape, strict=True)
    )
    return View(x.tensor, dims, x.fixed)


@rule(aten.contiguous.default, aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default)
def _same(reader: Reader, x: View | Expression, **_: Any) -> View | Expression:  # noqa: ARG001
    if isinstance(x, Expression) and x.name != "bias where shown":  # attention reads that, however it lies
        raise UnknownError("a copy of a part of an operator")
    return x


@rule(aten.select.int)
def _select(reader: Reader, x: View, dim: int, index: int) -> View:  # noqa: ARG001
    place = dim % len(x.dims)
    axes = whole(x.dims[place])
    if len(axes) > 1:
        raise UnknownError("one place along a dimension of several axes")
    fixed = tuple((axis, index % axis.extent) for axis in axes)
    return View(x.tensor, (*x.dims[:place], *x.dims[place + 1 :]), (*x.fixed, *fixed))


@rule(aten.slice.Tensor)
def _slice(
    reader: Reader,  # noqa: ARG001
    x: Any,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> View | Expression:
    if is_named(x, WEIGHTS):
        return without_sinks(x, dim, start, end, step)
    if not isinstance(x, View):
        raise UnknownError("a slice of what is no tensor that is known")
    place = dim % len(x.dims)
    size = extent(whole(x.dims[place]))
    first, last, _ = slice(start, end).indices(size)  # as torch does, bounds beyond the ends are the ends
    if (first, last, step) == (0, size, 1):
        return x
    if step != 1:
        raise UnknownError(f"a slice with steps of {step}")
    return Expression("slice", (x, place, first, max(last - first, 0)))


def sliced(reader: Reader, x: View, place: int, first: int, taken: int) -> View:
    """Return a slice of a dimension as one place along an axis, for which that is split.

    Raises:
        UnknownError: the dimension does not consist of slices like this one.
    """
    size = extent(whole(x.dims[place]))
    if taken == size:
        return x
    if taken <= 0 or size % taken or first % taken:
        raise UnknownError(f"a slice of {taken} of {size} elements from {first}")
    count, part = reader.axes.regrouped([x.dims[place]], [size // taken, taken])
    if len(whole(count)) != 1:
        raise UnknownError(f"one of {size // taken} slices of a dimension of several axes")
    (axis,) = whole(count)
    return View(x.tensor, (*x.dims[:place], part, *x.dims[place + 1 :]), (*x.fixed, (axis, first // taken)))


def split(reader: Reader, x: View, size: int, dim: int = 0) -> tuple[View, ...]:
    place = dim % len(x.dims)
    elements = extent(whole(x.dims[place]))
    return tuple(sliced(reader, x, place, first, size) for first in range(0, elements, size))


RULES[aten.split.Tensor] = split


@rule(aten.split_with_sizes.default)
def _split_with_sizes(reader: Reader, x: View, sizes: Sequence[int], dim: int = 0) -> tuple[View | Expression, ...]:
    place = dim % len(x.dims)
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    return tuple(_taken(reader, x, place, first, size) for first, size in zip(firsts, sizes, strict=True))


def _taken(reader: Reader, x: View, place: int, first: int, size: int) -> View | Expression:
    """Return a slice of a dimension; of a tensor from outside, also one that is no multiple of its own length away.

    Attention's packed weights are split so where keys and values come from another tensor than queries.
    """
    elements = extent(whole(x.dims[place]))
    if not size:
        return Expression("empty")
    if elements % size == 0 and first % size == 0:
        return sliced(reader, x, place, first, size)
    tensor = x.tensor
    if tensor.made_by is not None or tensor.computed is not None or x.fixed or x.dims != tensor.dims:
        raise UnknownError(f"a slice of {size} of {elements} elements from {first}")
    dims = (*x.dims[:place], *fresh([size]), *x.dims[place + 1 :])
    part = Computed(_narrowed, (tensor,), (place, first, size))
    return View(TensorValue(dims, tensor.dtype, tensor.node, tensor.parameter, computed=part), dims)


def _narrowed(tensor: Tensor, place: int, first: int, size: int, dtype: torch.dtype) -> Tensor:
    return tensor.narrow(place, first, size).to(dtype)


@rule(aten.chunk.default)
def _chunk(reader: Reader, x: View, count: int, dim: int = 0) -> tuple[View, ...]:
    return split(reader, x, -(-extent(whole(x.dims[dim % len(x.dims)])) // count), dim)


@rule(aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default, aten.to.other)
def _to(reader: Reader, x: Any, *given: Any, **named: Any) -> Any:  # noqa: ARG001
    inner = uncast(x)
    if is_named(inner, "normalised"):  # RMS norm has its mean in float32, whatever the type of its input
        if reader.dtype in (inner.operands[0].dtype, "float32"):
            return inner
        raise UnknownError(f"a cast of what is normalised to {reader.dtype}")
    if is_named(inner, "cast"):
        inner = reader.cast(*inner.operands)
    if not isinstance(inner, View):
        raise UnknownError("a cast of what is no tensor that is known")
    return inner if reader.dtype == inner.dtype else Expression("cast", (inner, reader.dtype))


@rule(aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default)
def _and(reader: Reader, a: View, b: View) -> View:
    count = max(len(a.dims), len(b.dims))
    sides = [((),) * (count - len(each.dims)) + each.dims for each in (a, b)]
    shape = [max(extent(whole(one)), extent(whole(other))) for one, other in zip(*sides, strict=True)]
    for one, other in ((a, b), (b, a)):
        if one.dtype == other.dtype == "bool" and reader.masks.hides_nothing(one):
            found: View = _expand(reader, other, shape)
            return found
    raise UnknownError("two masks that both hide something")


@rule(aten.unbind.int)
def _unbind(reader: Reader, x: View, dim: int = 0) -> tuple[View, ...]:
    return tuple(_select(reader, x, dim, place) for place in range(extent(whole(x.dims[dim % len(x.dims)]))))
