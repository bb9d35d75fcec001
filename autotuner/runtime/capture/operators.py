"""Operators of core ATen, as torch's composite calls ask for them, read as operators of ours.

Each rule gets what an ATen call gets, with a `View` for each tensor, and returns what the call does. What cannot be
said raises `UnknownError`, and the node that asked for it stays torch's.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from autotuner.ir.kinds import SOFTMAXES
from autotuner.runtime.capture.attention_masks import sum_of_masks
from autotuner.runtime.capture.axes import Axis, Dim, UnknownError, extent, fresh, whole
from autotuner.runtime.capture.deferred import is_named
from autotuner.runtime.capture.program import BoundView, Expression, View
from autotuner.runtime.capture.reader import Reader, aten, held, in_order, learned, memory, plain, rule
from autotuner.runtime.capture.scores import biased_where_shown, causal, in_pieces, masked, with_mask
from autotuner.runtime.capture.sinks import SCORES, WEIGHTS
from autotuner.runtime.capture.written_out import in_widest_type, part_of_product, part_of_sum, rms_norm

# Products -------------------------------------------------------------------------------------------------------------


def _product(
    reader: Reader, a: View, b: View, summed: tuple[int, int], batch: int = 0, order: Sequence[Axis] = ()
) -> View:
    """Return a product over one dimension of each; the first `batch` dimensions are of both.

    Args:
        order: axes that come first in memory; by default, without a batch, as in the first operand's memory.
    """
    a, b = reader.typed(a), reader.typed(b)
    renamed: list[tuple[Axis, Axis]] = []
    of_second = {*held(b)}
    for mine, other in zip(a.dims[:batch], b.dims[:batch], strict=True):
        if whole(other) and whole(mine) and set(whole(other)) & of_second:
            renamed += reader.axes.unite(mine, other)
    renamed += reader.axes.unite(a.dims[summed[0]], b.dims[summed[1]])
    for view, place in zip((a, b), summed, strict=True):
        if not {*whole(view.dims[place])} <= {*held(view)}:
            raise UnknownError("a product that sums over what an operand only repeats")
    of_a = [dim for place, dim in enumerate(a.dims) if place != summed[0] % len(a.dims)]
    of_b = [dim for place, dim in enumerate(b.dims) if place >= batch and place != summed[1] % len(b.dims)]
    reader.axes.bind(of_a)
    reader.axes.bind(of_b)
    taken = {axis for dim in of_a for axis in whole(dim)}
    rows: list[Dim] = []
    for dim in of_b:
        row: list[Axis] = []
        for axis in whole(dim):
            if axis in taken:  # as where positions meet positions
                own = Axis(axis.extent, free=False)
                reader.axes.keep((axis, own))
                renamed.append((axis, own))
                row.append(own)
            else:
                row.append(axis)
        rows.append(tuple(row))
    dims = (*of_a, *rows)
    there = {*held(a), *held(b), *(axis for _, own in renamed for axis in whole([own]))}
    # what an operand only repeats, as an expanded one does, the product repeats as well
    wanted = [axis for axis in whole(axis for dim in dims for axis in dim) if axis in there]
    first = [axis for axis in (order or ([] if batch else held(a))) if axis in wanted]
    axes = [*first, *(axis for axis in wanted if axis not in first)]
    (made,) = reader.make("contraction", (a, BoundView(b, tuple(renamed))), [axes])
    return View(made, dims)


@rule(aten.linear.default)
def _linear(reader: Reader, x: View, weight: View, bias: View | None = None) -> View:
    y = _product(reader, x, weight, (-1, 1))
    return y if bias is None else _with_bias(reader, y, bias)


@rule(aten.addmm.default)
def _addmm(reader: Reader, bias: View, x: View, weight: View, *, beta: float = 1, alpha: float = 1) -> View:
    if (beta, alpha) != (1, 1):
        raise UnknownError("a product with factors")
    return _with_bias(reader, _product(reader, x, weight, (1, 0)), bias)


@rule(aten.mm.default)
def _mm(reader: Reader, a: View, b: View) -> View:
    return _product(reader, a, b, (1, 0))


@rule(aten.bmm.default)
def _bmm(reader: Reader, a: View, b: View) -> View:
    return _product(reader, a, b, (-1, 1), 1, _as_queries(a))


def _as_queries(weights: View) -> list[Axis]:
    """Return the axes of the queries in the order of their memory, where weights are those of attention written out."""
    made, has_softmax = weights.tensor.made_by, False
    while made is not None and made.kind in _OF_WEIGHTS:
        has_softmax = has_softmax or made.kind in SOFTMAXES
        made = made.inputs[0].view.tensor.made_by
    is_attention = made is not None and made.kind == "contraction" and has_softmax
    return held(made.inputs[0].view) if made is not None and is_attention else []


_OF_WEIGHTS = ("dropout", *SOFTMAXES, "mask", "bias", "pointwise", "scale")


@rule(aten.matmul.default)
def _matmul(reader: Reader, a: View, b: View) -> View:
    if len(b.dims) == 2:
        return _product(reader, a, b, (-1, 0))
    if len(a.dims) != len(b.dims) or len(b.dims) < 2:
        raise UnknownError(f"a product of {len(a.dims)} and {len(b.dims)} dimensions")
    return _product(reader, a, b, (-1, -2), len(a.dims) - 2, _as_queries(a))


@rule(aten.einsum.default)
def _einsum(reader: Reader, equation: str, operands: Sequence[View], path: Any = None) -> View:  # noqa: ARG001
    terms, _, out = equation.replace(" ", "").partition("->")
    sides = terms.split(",")
    if len(sides) != 2 or len(operands) != 2 or not out or "." in equation:
        raise UnknownError(f"einsum of {equation}")
    (a, b), (one, other) = operands, sides
    if a.tensor.parameter and not b.tensor.parameter:
        (a, b), (one, other) = (b, a), (other, one)
    batch = [letter for letter in out if letter in one and letter in other]
    summed = [letter for letter in one if letter in other and letter not in out]
    of_one = [letter for letter in one if letter not in other]
    of_other = [letter for letter in other if letter not in one]
    is_product = summed and sorted((*batch, *of_one, *of_other)) == sorted(out)
    if not is_product or any(len(set(each)) < len(each) for each in (one, other)):
        raise UnknownError(f"einsum of {equation}: no product of two")

    def turned(x: View, side: str, own: Sequence[str]) -> View:
        dims = dict(zip(side, x.dims, strict=True))
        last = tuple(axis for letter in summed for axis in dims[letter])
        return View(x.tensor, (*(dims[letter] for letter in (*batch, *own)), last), x.fixed)

    a, b = turned(a, one, of_one), turned(b, other, of_other)
    made = _product(reader, a, b, (-1, -1), len(batch), _as_queries(a) if batch else ())
    dims = dict(zip((*batch, *of_one, *of_other), made.dims, strict=True))
    return View(made.tensor, tuple(dims[letter] for letter in out))


def _with_bias(reader: Reader, x: View, bias: View) -> View:
    x, bias = reader.typed(x), reader.typed(bias)
    return reader.mapped("bias", x, reader.united(x.dims, bias))


# Element-wise ---------------------------------------------------------------------------------------------------------


@rule(aten.add.Tensor)
def _add(reader: Reader, a: Any, b: Any, *, alpha: float = 1) -> Any:
    if alpha != 1:
        raise UnknownError("a sum with a factor")
    for one, other in ((a, b), (b, a)):
        found = part_of_sum(reader, one, other)
        if found is not None:
            return found
        if isinstance(one, View) and is_named(other, "bias where shown"):
            return biased_where_shown(reader, reader.typed(one), *other.operands)
    if not isinstance(a, View) or not isinstance(b, View):
        raise UnknownError("a sum with a number")
    a, b = reader.typed(a), reader.typed(b)
    if _shape(a) == _shape(b) and _is_whole(a) and _is_whole(b):
        other = reader.united(a.dims, b)
        in_order(a, other)
        return reader.mapped("add", a, other)
    found = sum_of_masks(reader, a, b)
    if found is not None:
        return found
    wide, narrow = (a, b) if _is_whole(a) and len(a.dims) >= len(b.dims) else (b, a)
    if not _is_whole(wide) or extent(axis for dim in wide.dims for axis in whole(dim)) < extent(
        axis for dim in narrow.dims for axis in whole(dim)
    ):
        raise UnknownError("a sum in which both operands are repeated")
    return _with_bias(reader, wide, narrow)


def _shape(view: View) -> list[int]:
    return [extent(whole(dim)) for dim in view.dims]


def _is_whole(view: View) -> bool:
    """Say whether a view repeats nothing."""
    return set(whole(axis for dim in view.dims for axis in dim)) <= set(held(view))


@rule(aten.mul.Tensor, aten.mul.Scalar)
def _mul(reader: Reader, a: Any, b: Any) -> Any:
    for one, other in ((a, b), (b, a)):
        found = part_of_product(reader, one, other)
        if found is not None:
            return found
    for one, other in ((a, b), (b, a)):
        if isinstance(one, View) and isinstance(other, int | float):
            return reader.mapped("scale", reader.typed(one), factor=float(other))
    if not isinstance(a, View) or not isinstance(b, View):
        raise UnknownError("a product outside of what is known")
    if _shape(a) == _shape(b) and _is_whole(a) and _is_whole(b):
        a, b = reader.typed(a), reader.typed(b)
        other = reader.united(a.dims, b)
        in_order(a, other)
        return reader.mapped("multiply", a, other)
    if any(not held(each) for each in (a, b)):
        raise UnknownError("a product with a tensor of one element")
    return Expression("times", (a, b))


@rule(aten.div.Tensor, aten.div.Scalar)
def _div(reader: Reader, x: Any, by: Any) -> View:
    if not isinstance(x, View) or not isinstance(by, int | float) or not by:
        raise UnknownError("a quotient of tensors, or by zero")
    return reader.mapped("scale", reader.typed(x), factor=1.0 / float(by))


@rule(aten.gelu.default)
def _gelu(reader: Reader, x: View, *, approximate: str = "none") -> View:
    return reader.mapped("gelu_erf" if approximate == "none" else "gelu_tanh", reader.typed(x))


@rule(aten.relu.default)
def _relu(reader: Reader, x: View) -> View:
    return reader.mapped("relu", reader.typed(x))


@rule(aten.silu.default)
def _silu(reader: Reader, x: View) -> View:
    return reader.mapped("silu", reader.typed(x))


@rule(aten.dropout.default)
def _dropout(reader: Reader, x: View, p: float, train: bool) -> View:
    if not train or p == 0:
        return x
    if p >= 1:
        raise UnknownError("dropout of everything")
    (mask,) = reader.make("dropout_mask", (), [memory(x)], {"p": float(p)}, x.dtype)
    return reader.mapped("dropout", x, View(mask, mask.dims), p=float(p))


# Normalisations -------------------------------------------------------------------------------------------------------


@rule(aten.layer_norm.default)
def _layer_norm(
    reader: Reader,
    x: View,
    shape: Sequence[int],
    weight: View | None = None,
    bias: View | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,  # noqa: ARG001
) -> View:
    if len(shape) != 1:
        raise UnknownError("a layer norm over several dimensions")
    if weight is None and bias is not None:
        raise UnknownError("a layer norm with a bias and without a scale")
    x, *vectors = in_widest_type(reader, x, *(each for each in (weight, bias) if each is not None))
    operands: list[View | BoundView] = [x, *(reader.united(x.dims, vector) for vector in vectors)]
    axes, normalised = memory(x), whole(x.dims[-1])
    rest = [axis for axis in axes if axis not in normalised]
    made = reader.make("layer_norm", operands, [axes, rest, rest], {"epsilon": float(eps)})
    return reader.typed(View(made[0], x.dims))


@rule(aten.rms_norm.default)
def _rms_norm(
    reader: Reader, x: View, shape: Sequence[int], weight: View | None = None, eps: float | None = None
) -> View:
    if len(shape) != 1:
        raise UnknownError("an RMS norm over several dimensions")
    if eps is None and x.dtype not in ("float32", "float64"):
        raise UnknownError(f"an RMS norm of {x.dtype} without epsilon")
    return rms_norm(reader, x, weight, torch.finfo(getattr(torch, x.dtype)).eps if eps is None else float(eps))


@rule(aten.softmax.int)
def _softmax_call(reader: Reader, x: Any, dim: int, dtype: torch.dtype | None = None) -> View | Expression:  # noqa: ARG001
    if is_named(x, SCORES):
        scores, sinks = x.operands
        if dim % len(scores.dims) != len(scores.dims) - 1:
            raise UnknownError("a softmax over another dimension than that of keys and sinks")
        return Expression(WEIGHTS, (softmax(reader, scores, -1, sinks),))
    if not isinstance(x, View):
        raise UnknownError("a softmax of what is no tensor that is known")
    return softmax(reader, x, dim)


def softmax(reader: Reader, x: View, dim: int, sinks: View | None = None) -> View:
    """Append a softmax along one dimension; kernels compute it in float32 whatever the type."""
    x = reader.typed(with_mask(reader, in_pieces(reader, x), beside_sinks=sinks is not None))
    place = dim % len(x.dims)
    axes = whole(x.dims[place])
    if len(axes) != 1:
        raise UnknownError("a softmax over a dimension of several axes")
    reader.axes.keep(axes)
    axes_of_x = memory(x)
    beside = () if sinks is None else (reader.united(x.dims, reader.typed(sinks)),)
    made = reader.make("sink_softmax" if beside else "softmax", (x, *beside),
                       [axes_of_x, [axis for axis in axes_of_x if axis is not axes[0]]], {"axis": axes[0]})  # fmt: skip
    return View(made[0], x.dims)


@rule(aten.baddbmm.default)
def _baddbmm(reader: Reader, mask: View, a: View, b: View, *, beta: float = 1, alpha: float = 1) -> View:
    """Append scores and the mask that is added to them, as torch has it where attention returns its weights."""
    if beta != 1:
        raise UnknownError("a sum with a factor")
    scores = _bmm(reader, a, b)
    if alpha != 1:
        scores = reader.mapped("scale", scores, factor=float(alpha))
    return masked(reader, scores, mask, written_out=True)[0]


_LOWEST = frozenset(torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64))


@rule(aten.where.ScalarOther)
def _where(reader: Reader, shown: Any, values: Any, other: Any) -> Expression:
    """A learned bias where a mask is true, and the lowest number elsewhere: what transformers has attention add."""
    from_outside = all(
        isinstance(each, View) and each.tensor.made_by is None and each.tensor.computed is None and not each.fixed
        for each in (shown, values)
    )
    if not from_outside or shown.dtype != "bool" or values.dtype != reader.dtype or other not in _LOWEST:
        raise UnknownError("a choice that is none between a bias and the lowest number, by a mask")
    if not learned(values) and not reader.masks.hides_nothing(values):
        raise UnknownError("a mask of two, of which nothing is learned: it is made once")
    return Expression("bias where shown", (values, shown, other))


@rule(aten.scaled_dot_product_attention.default)
def _attention(
    reader: Reader,
    query: View,
    key: View,
    value: View,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> View:
    if enable_gqa:
        key, value = (_for_each_query(each, query) for each in (key, value))
    batch = len(query.dims) - 2
    scores = _product(reader, query, key, (-1, -1), batch)
    usual = 1 / math.sqrt(extent(whole(query.dims[-1])))
    # Of all that differs in the last digit, one number: calls that are equal have one key.
    factor = usual if scale is None or math.isclose(scale, usual, rel_tol=1e-12) else float(scale)
    if factor != 1.0:
        scores = reader.mapped("scale", scores, factor=factor)
    sees = None
    if attn_mask is not None and reader.masks.hides_nothing(attn_mask):
        attn_mask = None
    if is_named(attn_mask, "bias where shown"):
        scores = biased_where_shown(reader, scores, *attn_mask.operands)
    elif is_causal:
        scores = causal(reader, scores)
    elif attn_mask is not None:
        scores, sees = masked(reader, scores, plain(attn_mask, "an attention mask"))
    weights = _dropout(reader, softmax(reader, scores, -1), dropout_p, True)
    context = _product(reader, weights, value, (-1, -2), batch, held(query))
    return context if sees is None else reader.mapped("row_mask", context, reader.united(context.dims, sees))


def _for_each_query(given: View, query: View) -> View:
    """Return keys or values with the heads of the queries: each of them repeated for several that follow each other."""
    wanted, heads = (extent(whole(each.dims[-3])) for each in (query, given))
    if wanted % heads:
        raise UnknownError(f"attention of {wanted} heads with keys of {heads}")
    repeated = (*given.dims[-3], *fresh([wanted // heads])[0])
    return View(given.tensor, (*given.dims[:-3], repeated, *given.dims[-2:]), given.fixed)
