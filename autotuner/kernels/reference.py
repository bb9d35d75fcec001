"""Reference of every operator kind in plain torch: what all kernels are verified against.

It computes in the dtype of its inputs, so a caller that wants more digits upcasts first: a cast leaves float64 as it
is. Every function is made of
functional aten operators, so that a subgraph can be traced and compiled.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from autotuner.errors import GraphError
from autotuner.ir.programmed import WITH_SHAPES
from autotuner.ir.records import Node, Scalar, Subgraph, TensorType
from autotuner.kernels.torch import packed_attention
from autotuner.kernels.torch.programmed import PROGRAMMED, onto, widened

Function = Callable[[Node, Sequence[Tensor]], tuple[Tensor, ...]]


def evaluate(
    subgraph: Subgraph,
    inputs: Sequence[Tensor | None],
    given: Mapping[int, Tensor] | None = None,
    *,
    rounded: bool = False,
) -> list[Tensor | None]:
    """Run a subgraph node by node and return its boundary outputs in order.

    Args:
        subgraph: what to run.
        inputs: one per boundary input, axes in declared order; None where an optional one is absent.
        given: tensors by number that stand in for what a node would make (a mask that a kernel drew, say).
        rounded: each node computes in float32, and its results are rounded to their declared types: so do kernels of
            the framework that run operator by operator.

    Raises:
        GraphError: an operator kind without a reference.
    """
    known: dict[int, Tensor | None] = dict(zip(subgraph.inputs, inputs, strict=True))
    given = given or {}
    known.update(given)
    read = {number for node in subgraph.nodes for number in node.inputs} | set(subgraph.outputs)
    for node in subgraph.nodes:
        if node.kind not in REFERENCE:
            raise GraphError(f"kind {node.kind!r} has no reference; known: {', '.join(REFERENCE)}")
        if all(number in given for number in node.outputs):
            continue
        operands = [known.get(number) for number in node.inputs] or [_blank(subgraph.tensors[node.outputs[0]], known)]
        if rounded:
            operands = [x.float() if x is not None and x.is_floating_point() else x for x in operands]
        made = REFERENCE[node.kind](_without_unread(node, read), operands)  # type: ignore[arg-type]
        if node.kind in WITH_SHAPES:  # whose text has other shapes, of as many elements
            extents = (subgraph.tensors[number].extents for number in node.outputs)
            made = tuple(tensor.reshape(shape) for tensor, shape in zip(made, extents, strict=False))
        for number, tensor in zip(node.outputs, made, strict=False):
            stored = tensor.to(getattr(torch, subgraph.tensors[number].dtype)) if rounded else tensor
            known.setdefault(number, stored)
    return [known[number] for number in subgraph.outputs]


def _blank(wanted: TensorType, known: Mapping[int, Tensor | None]) -> Tensor:
    """Return an empty tensor that says shape, dtype and device to a node without inputs."""
    like = next((t for t in known.values() if t is not None and t.is_floating_point()), None)
    wide = like is not None and like.dtype == torch.float64
    dtype = torch.float64 if wide else getattr(torch, wanted.dtype)
    return torch.empty(wanted.extents, dtype=dtype, device=None if like is None else like.device)


def _without_unread(node: Node, read: set[int]) -> Node:
    """Return a node without its last outputs where nothing reads them, so that they need not be computed."""
    count = max([1, *(i for i, number in enumerate(node.outputs, start=1) if number in read)])
    return replace(node, outputs=node.outputs[:count])


def _axes(node: Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
    left, right = node.spec.split("->")
    return tuple(left.split(",")), tuple(right.split(","))


def _number(node: Node, attribute: str) -> float:
    return float(_attribute(node, attribute))


def _attribute(node: Node, name: str) -> Scalar:
    return dict(node.attributes)[name]


def _places(part: str, whole: str) -> list[int]:
    """Return the place in `whole` of each axis of `part`."""
    return [whole.index(axis) for axis in part]


def _sum_onto(tensor: Tensor, whole: str, axes: str) -> Tensor:
    """Sum over the axes of `whole` that `axes` lacks, and return the rest in the order of `axes`."""
    missing = _places(_left(whole, axes), whole)
    return _in_order(tensor.sum(missing) if missing else tensor, whole, axes)


def _mean_onto(tensor: Tensor, whole: str, axes: str) -> Tensor:
    """Return the mean over the axes of `whole` that `axes` lacks, the rest in the order of `axes`."""
    return _in_order(tensor.mean(_places(_left(whole, axes), whole)), whole, axes)


def _in_order(tensor: Tensor, whole: str, axes: str) -> Tensor:
    """Return a tensor, whose axes are those of `axes` in the order of `whole`, in the order of `axes`."""
    rest = "".join(axis for axis in whole if axis in axes)
    return tensor.permute([rest.index(axis) for axis in axes])


def _contraction(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (torch.einsum(node.spec, *tensors),)


def _bias(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (whole, axes), _ = _axes(node)
    x, bias = tensors
    return (x + onto(bias, axes, whole),)


def _bias_grad(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (whole,), (axes,) = _axes(node)
    return (_sum_onto(tensors[0], whole, axes),)


def _row_mask(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (whole, axes), _ = _axes(node)
    x, mask = tensors
    return (x * onto(mask, axes, whole),)


def _scale(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (tensors[0] * _number(node, "factor"),)


def _cast(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (x,) = tensors
    return (x if x.dtype == torch.float64 else x.to(getattr(torch, str(_attribute(node, "dtype")))),)


def _causal_mask(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Keep a score where its key is at or before its query, both counted from the first; -inf elsewhere."""
    query, key = _queries_and_keys(node, tensors[0])
    return (torch.where(key <= query, tensors[0], float("-inf")),)


def _window_mask(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Keep a score where its key is at most `before` places before its query, or `after` behind it; -inf elsewhere."""
    query, key = _queries_and_keys(node, tensors[0])
    before, after = (int(_number(node, name)) for name in ("before", "after"))
    return (torch.where((query - before <= key) & (key <= query + after), tensors[0], float("-inf")),)


def _queries_and_keys(node: Node, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of queries and keys, each along its axis of the scores."""
    (whole,) = _axes(node)[0]
    axes = (str(_attribute(node, name)) for name in ("query_axis", "key_axis"))
    query, key = (onto(torch.arange(x.shape[whole.index(axis)], device=x.device), axis, whole) for axis in axes)
    return query, key


def _softmax(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (x,) = tensors
    axis = _axes(node)[0][0].index(str(_attribute(node, "axis")))
    weights = torch.softmax(x, axis)
    return (weights,) if len(node.outputs) == 1 else (weights, torch.logsumexp(x, axis))


def _sink_softmax(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return exp(x - s) with s the log-sum-exp of a row and its sink, and s."""
    (whole, sinks), _ = _axes(node)
    x, sink = map(widened, tensors)  # compiled as it stands, which leaves the statistic in float32
    axis = whole.index(str(_attribute(node, "axis")))
    total = torch.logaddexp(torch.logsumexp(x, axis, keepdim=True), onto(sink, sinks, whole))
    return (x - total).exp(), total.squeeze(axis)


def _sink_grad(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradient of each sink: its own weight has the value 0, so it is less by what flows to the others."""
    (whole, _, rest, sinks), _ = _axes(node)
    grad, weights, total, sink = map(widened, tensors)
    axis = whole.index(str(_attribute(node, "axis")))
    own = (onto(sink, sinks, whole) - onto(total, rest, whole)).exp()
    return (_sum_onto(-own * (grad * weights).sum(axis, keepdim=True), whole, sinks),)


def _softmax_grad(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    grad, weights = tensors[:2]
    axis = _axes(node)[0][0].index(str(_attribute(node, "axis")))
    return (weights * (grad - (grad * weights).sum(axis, keepdim=True)),)


def _gelu_erf(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (torch.nn.functional.gelu(tensors[0], approximate="none"),)


def _gelu_tanh(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (torch.nn.functional.gelu(tensors[0], approximate="tanh"),)


def _relu(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (torch.relu(tensors[0]),)


def _gelu_erf_grad(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (torch.ops.aten.gelu_backward(*tensors, approximate="none"),)


def _gelu_tanh_grad(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (torch.ops.aten.gelu_backward(*tensors, approximate="tanh"),)


def _relu_grad(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (torch.ops.aten.threshold_backward(*tensors, 0),)


def _dropout_mask(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Draw in the raw format. The one tensor that it gets says shape, dtype and device."""
    (blank,) = tensors
    p = _number(node, "p")
    kept = torch.rand(blank.shape, device=blank.device) >= p
    return (kept.to(blank.dtype) * (1.0 / (1.0 - p)),)


def _dropout(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x, mask = tensors
    return (x * mask * (1.0 / (1.0 - _number(node, "p"))) if mask.dtype == torch.bool else x * mask,)


def _conversion(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (have,), (want,) = _axes(node)
    return (tensors[0].permute(_places(want, have)),)


def _add(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x, y = tensors
    return (x + y,)


def _left(whole: str, rest: str) -> str:
    """Return the axes that a norm runs along: those that its statistics lack."""
    return "".join(axis for axis in whole if axis not in rest)


def _layer_norm(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (whole, *affine), (_, rest, _) = _axes(node)
    x, *vectors = (onto(tensor, axes, whole) for tensor, axes in zip(tensors, (whole, *affine), strict=True))
    mean = _mean_onto(x, whole, rest)
    centred = x - onto(mean, rest, whole)
    reciprocal_deviation = torch.rsqrt(_mean_onto(centred * centred, whole, rest) + _number(node, "epsilon"))
    y = centred * onto(reciprocal_deviation, rest, whole)
    for scale in vectors[:1]:
        y = y * scale
    for bias in vectors[1:]:
        y = y + bias
    return y, mean, reciprocal_deviation


def _layer_norm_grad_input(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (whole, *_, rest), _ = _axes(node)
    grad, x, *scale, mean, reciprocal_deviation = tensors
    normal = (x - onto(mean, rest, whole)) * onto(reciprocal_deviation, rest, whole)
    return _norm_grad_input(node, (grad, normal, *scale), reciprocal_deviation, centred=True)


def _norm_grad_input(node: Node, tensors: Sequence[Tensor], reciprocal: Tensor, *, centred: bool) -> tuple[Tensor, ...]:
    """Return the gradient of a norm's input, given the result's, what the input was normalised to, and a scale."""
    (whole, _, *others), _ = _axes(node)
    grad, normal, *scale = tensors
    rest = others[-1]
    places = _places(_left(whole, rest), whole)
    scaled = grad * onto(scale[0], others[0], whole) if scale else grad
    found = scaled - scaled.mean(places, keepdim=True) if centred else scaled
    return (onto(reciprocal, rest, whole) * (found - normal * (scaled * normal).mean(places, keepdim=True)),)


def _layer_norm_grad_parameters(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (whole, _, rest, _), (normalised, *shifted) = _axes(node)
    grad, x, mean, reciprocal_deviation = tensors
    normal = (x - onto(mean, rest, whole)) * onto(reciprocal_deviation, rest, whole)
    return _sum_onto(grad * normal, whole, normalised), *(_sum_onto(grad, whole, axes) for axes in shifted)


def _silu(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (torch.nn.functional.silu(tensors[0]),)


def _silu_grad(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (torch.ops.aten.silu_backward(*tensors),)


def _multiply(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x, y = tensors
    return (x * y,)


def _rotary(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (whole, *angles), _ = _axes(node)
    x = tensors[0]
    cos, sin = (onto(angle, axes, whole) for angle, axes in zip(tensors[1:], angles, strict=True))
    axis = whole.index(str(_attribute(node, "axis")))
    first, second = x.chunk(2, axis)
    return (x * cos + torch.cat((-second, first), axis) * sin,)


def _rotary_grad(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Multiply by the sines first: their halves need not be equal."""
    (whole, *angles), _ = _axes(node)
    grad = tensors[0]
    cos, sin = (onto(angle, axes, whole) for angle, axes in zip(tensors[1:], angles, strict=True))
    axis = whole.index(str(_attribute(node, "axis")))
    first, second = (grad * sin).chunk(2, axis)
    return (grad * cos + torch.cat((second, -first), axis),)


def _rms_norm(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (whole, *normalised), (_, rest) = _axes(node)
    x, *scale = tensors
    reciprocal_root = torch.rsqrt(_mean_onto(x * x, whole, rest) + _number(node, "epsilon"))
    y = x * onto(reciprocal_root, rest, whole)
    return y * onto(scale[0], normalised[0], whole) if scale else y, reciprocal_root


def _rms_norm_grad_input(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (whole, *_, rest), _ = _axes(node)
    grad, x, *scale, reciprocal_root = tensors
    normal = x * onto(reciprocal_root, rest, whole)
    return _norm_grad_input(node, (grad, normal, *scale), reciprocal_root, centred=False)


def _rms_norm_grad_parameters(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (whole, _, rest), (normalised,) = _axes(node)
    grad, x, reciprocal_root = tensors
    return (_sum_onto(grad * x * onto(reciprocal_root, rest, whole), whole, normalised),)


def _normalised(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (whole, *_, rest), _ = _axes(node)
    x, *mean, reciprocal = tensors
    centred = x - onto(mean[0], rest, whole) if mean else x
    return _cast(node, (centred * onto(reciprocal, rest, whole),))


def _normalised_grad_input(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return _norm_grad_input(node, tensors[:-1], tensors[-1], centred=bool(_attribute(node, "centred")))


def _normalised_grad_parameters(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (whole, _), (scaled_along, *shifted) = _axes(node)
    grad, normal = tensors
    return _sum_onto(grad * normal, whole, scaled_along), *(_sum_onto(grad, whole, axes) for axes in shifted)


REFERENCE: Mapping[str, Function] = {
    "contraction": _contraction,
    "bias": _bias,
    "bias_grad": _bias_grad,
    "scale": _scale,
    "cast": _cast,
    "mask": _bias,
    "row_mask": _row_mask,
    "causal_mask": _causal_mask,
    "window_mask": _window_mask,
    "softmax": _softmax,
    "softmax_grad": _softmax_grad,
    "sink_softmax": _sink_softmax,
    "sink_grad": _sink_grad,
    "gelu_erf": _gelu_erf,
    "gelu_erf_grad": _gelu_erf_grad,
    "gelu_tanh": _gelu_tanh,
    "gelu_tanh_grad": _gelu_tanh_grad,
    "relu": _relu,
    "relu_grad": _relu_grad,
    "dropout_mask": _dropout_mask,
    "dropout": _dropout,
    "conversion": _conversion,
    "add": _add,
    "multiply": _multiply,
    "silu": _silu,
    "silu_grad": _silu_grad,
    "rotary": _rotary,
    "rotary_grad": _rotary_grad,
    "rms_norm": _rms_norm,
    "rms_norm_grad_input": _rms_norm_grad_input,
    "rms_norm_grad_parameters": _rms_norm_grad_parameters,
    "layer_norm": _layer_norm,
    "layer_norm_grad_input": _layer_norm_grad_input,
    "layer_norm_grad_parameters": _layer_norm_grad_parameters,
    "normalised": _normalised,
    "normalised_grad_input": _normalised_grad_input,
    "normalised_grad_parameters": _normalised_grad_parameters,
    "packed_attention": packed_attention.of_node,
    "packed_attention_grad": packed_attention.of_node,
    "packed_attention_grad_bias": packed_attention.of_node,
    **PROGRAMMED,
}
