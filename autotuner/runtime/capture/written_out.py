"""Operators that models write out in simpler ones: GELU by tanh, RMS norm, rotary embeddings.

The rules of the simpler ones say what they are part of, as an `Expression`; the last one makes the operator. Nodes of
the parts that nobody else reads vanish.
"""

import math
from collections.abc import Sequence
from typing import Any

from autotuner.kernels.geometry import HALVES
from autotuner.runtime.capture.axes import UnknownError, extent, whole
from autotuner.runtime.capture.deferred import Deferred, is_named
from autotuner.runtime.capture.program import BoundView, Expression, View
from autotuner.runtime.capture.reader import RULES, Reader, Rule, aten, learned, memory, plain, rule
from autotuner.runtime.capture.sinks import beside_sinks

GELU_CUBIC = 0.044715


def is_close(number: Any, wanted: float) -> bool:
    return isinstance(number, int | float) and math.isclose(number, wanted, rel_tol=1e-4)


def is_same(a: Any, b: Any) -> bool:
    """Say whether two values are the same view of a tensor."""
    return isinstance(a, View) and isinstance(b, View) and (a.tensor, a.dims, a.fixed) == (b.tensor, b.dims, b.fixed)


def uncast(value: Any) -> Any:
    """Return what was cast to float32 from 16 bits, in which norms are computed anyway, or the value itself."""
    is_wider = is_named(value, "cast") and value.operands[1] == "float32" and value.operands[0].dtype in HALVES
    return value.operands[0] if is_wider else value


@rule(aten.pow.Tensor_Scalar)
def _pow(reader: Reader, x: Any, exponent: float) -> Expression:  # noqa: ARG001
    if not isinstance(uncast(x), View):
        raise UnknownError("a power of what is no tensor that is known")
    return Expression("power", (uncast(x), float(exponent)))


def _part(needed: str, made: str, what: str) -> Rule:
    """Return the rule of a call that is known in one operator only, as the part between two others."""

    def read(reader: Reader, x: Any) -> Expression:  # noqa: ARG001
        if not is_named(x, needed):
            raise UnknownError(f"it is known in {what} only")
        return Expression(made, x.operands)

    return read


RULES[aten.tanh.default] = _part("scaled inner", "gelu tanh", "GELU")
RULES[aten.rsqrt.default] = _part("mean square and epsilon", "reciprocal root", "RMS norm")
RULES[aten.neg.default] = _part("slice", "minus slice", "rotary embeddings")


@rule(aten.mean.dim)
def _mean(reader: Reader, x: Any, dims: Sequence[int], keepdim: bool = False, **_: Any) -> Expression:  # noqa: ARG001
    if isinstance(x, View):
        return Expression("mean", (x,))
    if not is_named(x, "power") or x.operands[1] != 2.0 or not keepdim:
        raise UnknownError("a mean outside of RMS norm")
    if [dim % len(x.operands[0].dims) for dim in dims] != [len(x.operands[0].dims) - 1]:
        raise UnknownError("a mean over other dimensions than the last")
    return Expression("mean square", x.operands[:1])


@rule(aten.cat.default)
def _cat(reader: Reader, parts: Sequence[Any], dim: int = 0) -> Any:
    filled = [part for part in parts if not is_named(part, "empty")]
    if len(filled) == 1 and len(parts) > 1:  # as keys behind those of a cache that has none yet
        (part,) = filled
        if isinstance(part, Deferred) and part.dtype == reader.dtype:
            return part
        return reader.typed(plain(part, "a part of what is put together"))
    if len(parts) == 2 and is_named(parts[0], "minus slice") and is_named(parts[1], "slice"):
        (x, *second), (other, *first) = parts[0].operands, parts[1].operands
        last = len(x.dims) - 1
        half = extent(whole(x.dims[-1])) // 2
        if is_same(x, other) and dim % len(x.dims) == last and (first, second) == ([last, 0, half], [last, half, half]):
            return Expression("rotated", (x,))
    found = beside_sinks(parts, dim)
    if found is None:
        raise UnknownError("tensors put together outside of a rotary embedding")
    return found


def part_of_sum(reader: Reader, one: Any, other: Any) -> Any:
    """Return what a sum is a part of, or makes; None if nothing that is known."""
    if is_named(other, "cubic") and is_same(one, other.operands[0]):
        return Expression("inner", (one,))
    if is_named(one, "gelu tanh") and is_close(other, 1.0):
        return Expression("one and gelu tanh", one.operands)
    if is_named(one, "mean square") and isinstance(other, int | float):
        return Expression("mean square and epsilon", (*one.operands, float(other)))
    if is_named(one, "times") and is_named(other, "rotated times") and is_same(one.operands[0], other.operands[0]):
        return _rotary(reader, one.operands[0], one.operands[1], other.operands[1])
    return None


def part_of_product(reader: Reader, one: Any, other: Any) -> Any:
    """Return what a product is a part of, or makes; None if nothing that is known."""
    if is_named(one, "power") and one.operands[1] == 3.0 and is_close(other, GELU_CUBIC):
        return Expression("cubic", one.operands[:1])
    if is_named(one, "inner") and is_close(other, math.sqrt(2 / math.pi)):
        return Expression("scaled inner", one.operands)
    if is_named(one, "one and gelu tanh") and isinstance(other, View):
        (x,), half = one.operands, other.tensor.made_by
        halves = half is not None and half.kind == "scale" and is_close(half.attributes["factor"], 0.5)
        if halves and half is not None and is_same(x, half.inputs[0].view):
            return reader.mapped("gelu_tanh", reader.typed(x))
    if is_named(one, "reciprocal root") and is_same(uncast(other), one.operands[0]):
        return Expression("normalised", one.operands)
    if is_named(one, "normalised") and isinstance(other, View) and _is_of_features(other):
        return rms_norm(reader, one.operands[0], other, one.operands[1])
    if is_named(one, "rotated") and isinstance(other, View):
        return Expression("rotated times", (*one.operands, other))
    return None


def _is_of_features(view: View) -> bool:
    """Say whether a tensor has a number for each feature, as a scale has, and not for other dimensions."""
    return bool(view.dims) and bool(view.dims[-1]) and not any(view.dims[:-1])


def rms_norm(reader: Reader, x: View, scale: View | None, epsilon: float) -> View:
    """Append an RMS norm over the last dimension."""
    x, *scales = in_widest_type(reader, x, *(() if scale is None else (scale,)))
    axes, normalised = memory(x), whole(x.dims[-1])
    rest = [axis for axis in axes if axis not in normalised]
    operands: list[View | BoundView] = [x, *(reader.united(x.dims, each) for each in scales)]
    made = reader.make("rms_norm", operands, [axes, rest], {"epsilon": epsilon})
    return reader.typed(View(made[0], x.dims))


def in_widest_type(reader: Reader, *operands: View) -> list[View]:
    """Return the operands of a norm in the widest of their types and the result's, in which torch computes it."""
    dtypes = {operand.dtype for operand in operands} | {reader.dtype}
    if len(dtypes) == 1:
        return list(operands)
    wide = "float64" if "float64" in dtypes else "float32"
    return [reader.cast(operand, wide) for operand in operands]


def _rotary(reader: Reader, x: Any, cosine: Any, sine: View) -> View:
    if not isinstance(x, View) or not isinstance(cosine, View):
        raise UnknownError("a rotary embedding of what is no tensor that is known")
    if learned(cosine) or learned(sine):
        raise UnknownError("a rotary embedding that is learned")
    x, cosine, sine = reader.typed(x), reader.typed(cosine), reader.typed(sine)
    axes = whole(x.dims[-1])
    if len(axes) != 1:
        raise UnknownError("a rotary embedding over a dimension of several axes")
    waves = [reader.united(x.dims, each) for each in (cosine, sine)]
    return reader.mapped("rotary", x, *waves, axis=axes[0])
