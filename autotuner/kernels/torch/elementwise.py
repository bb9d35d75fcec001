"""Element-wise operators, dropout masks, normalisations and reductions on the CPU through torch's own calls."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.records import Call, Node, Subgraph
from autotuner.kernels.geometry import band_of, letter_extents, merge, operand_letters
from autotuner.kernels.rules.elementwise import normalised
from autotuner.kernels.torch.programmed import onto, outside_of_band, widened

Run = Callable[[], Any]
Operands = Sequence[Tensor]

aten = torch.ops.aten


def _node(call: Call) -> Node:
    return call.subgraph.nodes[0]


def _attribute(call: Call, name: str) -> Any:
    return dict(_node(call).attributes)[name]


def spread(vector: Tensor, bound: str, letters: str, shape: Sequence[int]) -> Tensor:
    """View a narrow operand as one with all the axes of a wide one, stride 0 where it has none."""
    step = dict(zip(bound, vector.stride(), strict=True))
    return vector.as_strided(shape, [step.get(letter, 0) for letter in letters])


def in_memory_order(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """View a tensor with its axes slowest first; return the view and, for each of its axes, the declared one."""
    order = sorted(range(tensor.dim()), key=lambda axis: (-tensor.stride()[axis], axis))
    return tensor.permute(order), order


def copy(call: Call, inputs: Operands, outputs: Operands) -> Run:
    """Copy a tensor into another memory order."""
    (source,), (target,) = inputs, outputs
    have, want = operand_letters(_node(call))
    turned = source.permute([have.index(letter) for letter in want])
    return lambda: target.copy_(turned)


def scale(call: Call, inputs: Operands, outputs: Operands) -> Run:
    (x,), (y,), factor = inputs, outputs, float(_attribute(call, "factor"))
    return lambda: torch.mul(x, factor, out=y)


def cast(call: Call, inputs: Operands, outputs: Operands) -> Run:
    (x,), (y,) = inputs, outputs
    return lambda: y.copy_(x)


def casts(call: Call, inputs: Operands, outputs: Operands) -> Run:
    """Cast several tensors in one call."""
    by_number = dict(zip(call.subgraph.boundary, (*inputs, *outputs), strict=True))
    sources, made = ([by_number[number] for number in numbers] for numbers in zip(
        *((node.inputs[0], node.outputs[0]) for node in call.subgraph.nodes), strict=True))  # fmt: skip
    return lambda: torch._foreach_copy_(made, sources)


def add(call: Call, inputs: Operands, outputs: Operands) -> Run:
    first, second = (inputs[call.subgraph.inputs.index(number)] for number in _node(call).inputs)
    (out,) = outputs
    return lambda: torch.add(first, second, out=out)


def multiply(call: Call, inputs: Operands, outputs: Operands) -> Run:
    first, second = (inputs[call.subgraph.inputs.index(number)] for number in _node(call).inputs)
    (out,) = outputs
    return lambda: torch.mul(first, second, out=out)


def bias(call: Call, inputs: Operands, outputs: Operands) -> Run:
    letters, bound = operand_letters(_node(call))[:2]
    x, (y,) = inputs[0], outputs
    vector = spread(inputs[1], bound, letters, x.shape)
    return lambda: torch.add(x, vector, out=y)


mask = bias


def row_mask(call: Call, inputs: Operands, outputs: Operands) -> Run:
    letters, bound = operand_letters(_node(call))[:2]
    x, (y,) = inputs[0], outputs
    factor = spread(inputs[1], bound, letters, x.shape)
    return lambda: torch.mul(x, factor, out=y)


def band_mask(call: Call, inputs: Operands, outputs: Operands) -> Run:
    """Add a triangle of 0 and -inf, or a band, made once, that lies like the scores and is read again for every head.

    A sum takes as long as a scale; `torch.where` takes 2 to 6 times as long (16 heads of 64 x 64 to 512 x 512, float32,
    torch 2.13, Xeon, two cores).
    """
    (x,), (y,) = inputs, outputs
    letters = operand_letters(_node(call))[0]
    queries, keys = (letters.index(_attribute(call, name)) for name in ("query_axis", "key_axis"))
    hiding = outside_of_band(x.shape[queries], x.shape[keys], band_of(_node(call)) or (x.shape[keys], 0), x)
    if x.stride()[queries] < x.stride()[keys]:
        hiding = hiding.T.contiguous().T
    spread_hiding = spread(hiding, letters[queries] + letters[keys], letters, x.shape)
    return lambda: torch.add(x, spread_hiding, out=y)


causal_mask = window_mask = band_mask


def gelu_erf(call: Call, inputs: Operands, outputs: Operands) -> Run:
    (x,), (y,) = inputs, outputs
    return lambda: aten.gelu.out(x, out=y)


def gelu_tanh(call: Call, inputs: Operands, outputs: Operands) -> Run:
    (x,), (y,) = inputs, outputs
    return lambda: aten.gelu.out(x, approximate="tanh", out=y)


def silu(call: Call, inputs: Operands, outputs: Operands) -> Run:
    (x,), (y,) = inputs, outputs
    return lambda: aten.silu.out(x, out=y)


def relu(call: Call, inputs: Operands, outputs: Operands) -> Run:
    (x,), (y,) = inputs, outputs
    return lambda: torch.clamp_min(x, 0, out=y)


def gelu_erf_grad(call: Call, inputs: Operands, outputs: Operands) -> Run:
    (grad, x), (out,) = inputs, outputs
    return lambda: aten.gelu_backward.grad_input(grad, x, grad_input=out)


def gelu_tanh_grad(call: Call, inputs: Operands, outputs: Operands) -> Run:
    (grad, x), (out,) = inputs, outputs
    return lambda: aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=out)


def silu_grad(call: Call, inputs: Operands, outputs: Operands) -> Run:
    (grad, x), (out,) = inputs, outputs
    return lambda: aten.silu_backward.grad_input(grad, x, grad_input=out)


def relu_grad(call: Call, inputs: Operands, outputs: Operands) -> Run:
    (grad, y), (out,) = inputs, outputs
    return lambda: aten.threshold_backward.grad_input(grad, y, 0, grad_input=out)


def dropout(call: Call, inputs: Operands, outputs: Operands) -> Run:
    """A raw mask carries its scale; a byte mask is 0 or 1 and the scale is applied in place.

    A product with a boolean tensor would cast all of it into a buffer of the library's own. Cast into the output it
    needs none, and from bytes it is vectorised: 7 times faster than from booleans (Xeon with AVX-512, torch 2.13).
    """
    (x, kept), (y,) = inputs, outputs
    if kept.dtype != torch.bool:
        return lambda: torch.mul(x, kept, out=y)
    bits, factor = kept.view(torch.uint8), 1 / (1 - float(_attribute(call, "p")))
    return lambda: y.copy_(bits).mul_(x).mul_(factor)


def bernoulli(call: Call, inputs: Operands, outputs: Operands) -> Run:
    (kept,), keep = outputs, 1 - float(_attribute(call, "p"))
    if kept.dtype == torch.bool:
        return lambda: kept.bernoulli_(keep)
    return lambda: kept.bernoulli_(keep).mul_(1 / keep)


def random_bits(call: Call, inputs: Operands, outputs: Operands) -> Run:
    """Compare 16 random bits per element with p: 64 at a time from torch's generator, several times faster.

    p is met to 2**-17; the scale stays that of the exact p, so the expectation is off by less than 1e-5.
    """
    kept, p = in_memory_order(outputs[0])[0].view(-1), float(_attribute(call, "p"))
    threshold, factor = round(p * 65536) - 32768, 1 / (1 - p)
    count, lowest = kept.numel(), torch.iinfo(torch.int64).min

    def drawn() -> Tensor:  # anew in each call: kept, it would be as much memory again as a byte mask, twice, for good
        words = torch.empty((count + 3) // 4, dtype=torch.int64, device=kept.device)
        return words.random_(lowest, None).view(torch.int16)[:count]

    if kept.dtype == torch.bool:
        return lambda: torch.ge(drawn(), threshold, out=kept)

    def run_raw() -> None:
        ones = torch.ge(drawn(), threshold).view(torch.uint8)  # bytes are cast several times faster than booleans
        kept.copy_(ones).mul_(factor)

    return run_raw


def softmax(call: Call, inputs: Operands, outputs: Operands) -> Run:
    x, order = in_memory_order(inputs[0])
    y = outputs[0].permute(order)
    axis = order.index(operand_letters(_node(call))[0].index(_attribute(call, "axis")))
    return lambda: aten._softmax.out(x, axis, False, out=y)


def sink_softmax(call: Call, inputs: Operands, outputs: Operands) -> Run:
    whole, sinks = operand_letters(_node(call))[:2]
    (x, sink), (weights, total) = inputs, outputs
    axis = whole.index(_attribute(call, "axis"))
    beside = onto(sink, sinks, whole)

    def run() -> None:
        scores = widened(x)
        sums = torch.logaddexp(torch.logsumexp(scores, axis, keepdim=True), widened(beside))
        total.copy_(sums.squeeze(axis))
        weights.copy_((scores - sums).exp_())

    return run


def sink_grad(call: Call, inputs: Operands, outputs: Operands) -> Run:
    whole, _, rest, sinks = operand_letters(_node(call))[:4]
    (grad, weights, total, sink), (out,) = inputs, outputs
    axis = whole.index(_attribute(call, "axis"))
    beside, sums = onto(sink, sinks, whole), onto(total, rest, whole)
    summed = [place for place, letter in enumerate(whole) if letter not in sinks]
    target = out.permute([sinks.index(letter) for letter in whole if letter in sinks])

    def run() -> None:
        flow = (widened(grad) * weights).sum(axis, keepdim=True)
        target.copy_(flow.mul_((widened(beside) - sums).exp_()).sum(summed).neg_())

    return run


def softmax_grad(call: Call, inputs: Operands, outputs: Operands) -> Run:
    grad, order = in_memory_order(inputs[0])
    weights, out = inputs[1].permute(order), outputs[0].permute(order)
    axis = order.index(operand_letters(_node(call))[0].index(_attribute(call, "axis")))
    return lambda: aten._softmax_backward_data.out(grad, weights, axis, grad.dtype, grad_input=out)


def bias_grad(call: Call, inputs: Operands, outputs: Operands) -> Run:
    source, kept = operand_letters(_node(call))
    summed = [axis for axis, letter in enumerate(source) if letter not in kept]
    (grad,), (out,) = inputs, outputs
    target = out.permute([kept.index(letter) for letter in source if letter in kept])
    if not summed:  # torch sums over all axes where it is given none
        return lambda: target.copy_(grad)
    return lambda: torch.sum(grad, summed, out=target)


def bias_grad_ones(call: Call, inputs: Operands, outputs: Operands) -> Run:
    """The sum over rows as a matrix times a vector of ones, which the matrix library parallelises."""
    node = _node(call)
    source, kept = operand_letters(node)
    extents = letter_extents(call.subgraph, node)
    strides = [
        dict(zip(x, t.stride(), strict=True)) for x, t in zip((source, kept), (inputs[0], outputs[0]), strict=True)
    ]
    rows = merge([x for x in source if x not in kept], strides[:1], extents)
    columns = merge(kept, strides, extents)
    assert rows is not None
    assert columns is not None
    matrix = inputs[0].as_strided((columns.extent, rows.extent), (columns.strides[0], rows.strides[0]))
    out = outputs[0].as_strided((columns.extent,), (columns.strides[1],))
    ones = torch.ones(rows.extent, dtype=matrix.dtype, device=matrix.device)
    return lambda: torch.mv(matrix, ones, out=out)


def _into(outputs: Sequence[Tensor], made: Sequence[Tensor | None]) -> None:
    """Copy what a library call without an out-variant made into the given outputs: part of such a kernel's time."""
    for target, value in zip(outputs, made, strict=True):
        if value is not None:
            target.copy_(value)


def layer_norm(call: Call, inputs: Operands, outputs: Operands) -> Run:
    """The library's layer norm; it offers no out-variant, so what it made is copied."""
    x, order = in_memory_order(inputs[0])
    gamma, beta = (*inputs[1:], None, None)[:2]
    epsilon, axes = float(_attribute(call, "epsilon")), normalised(_node(call))
    shape = x.shape[-len(axes) :]
    back = [order.index(axis) for axis in range(len(order))]
    letters, *_, statistics = operand_letters(_node(call))
    left = [letters[axis] for axis in order][: len(order) - len(axes)]
    turn = [left.index(letter) for letter in statistics]

    def run() -> None:
        y, mean, deviation = torch.native_layer_norm(x, shape, gamma, beta, epsilon)
        rows = mean.shape[: len(left)]
        _into(outputs, (y.permute(back), mean.view(rows).permute(turn), deviation.view(rows).permute(turn)))

    return run


def _layer_norm_grad(
    call: Call,
    operands: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor],
    wanted: list[bool],
) -> Callable[[], tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Return a call of the library's backward on (gradient, x, scale, mean, deviation) that makes what is wanted."""
    grad, x, gamma, mean, deviation = operands
    grad_view, order = in_memory_order(grad)
    x_view = x.permute(order)
    count = len(normalised(_node(call)))
    shape = x_view.shape[-count:]
    rows = [*x_view.shape[:-count], *[1] * count]
    mean_view, deviation_view = in_memory_order(mean)[0].view(rows), in_memory_order(deviation)[0].view(rows)
    back = [order.index(axis) for axis in range(len(order))]
    vector = torch.ones(shape, dtype=x.dtype, device=x.device)
    gamma = vector if gamma is None else gamma

    def run() -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        into_x, into_gamma, into_beta = aten.native_layer_norm_backward(
            grad_view, x_view, shape, mean_view, deviation_view, gamma, vector, wanted
        )
        return (into_x.permute(back) if into_x is not None else None), into_gamma, into_beta

    return run


def layer_norm_grad_input(call: Call, inputs: Operands, outputs: Operands) -> Run:
    grad, x, *gamma, mean, deviation = inputs
    run = _layer_norm_grad(call, (grad, x, gamma[0] if gamma else None, mean, deviation), [True, False, False])
    return lambda: _into(outputs, run()[:1])


def layer_norm_grad_parameters(call: Call, inputs: Operands, outputs: Operands) -> Run:
    grad, x, mean, deviation = inputs
    run = _layer_norm_grad(call, (grad, x, None, mean, deviation), [False, True, len(outputs) > 1])
    return lambda: _into(outputs, run()[1 : 1 + len(outputs)])


def layer_norm_grad(call: Call, inputs: Operands, outputs: Operands) -> Run:
    """All gradients in one library call."""
    by_number = dict(zip(call.subgraph.inputs, inputs, strict=True))
    into_input = next(node for node in call.subgraph.nodes if node.kind == "layer_norm_grad_input")
    into_parameters = next(node for node in call.subgraph.nodes if node.kind == "layer_norm_grad_parameters")
    grad, x, gamma, mean, deviation = (by_number[number] for number in into_input.inputs)
    single = Call(Subgraph((into_input,), call.subgraph.tensors, into_input.inputs, into_input.outputs), call.candidate)
    run = _layer_norm_grad(single, (grad, x, gamma, mean, deviation), [True, True, len(into_parameters.outputs) > 1])
    made = (*into_input.outputs, *into_parameters.outputs)
    order = [made.index(number) for number in call.subgraph.outputs]

    def run_in_order() -> None:
        results = run()
        _into(outputs, [results[index] for index in order])

    return run_in_order
