"""Operators that carry a program: what they compute, which is their reference, and their kernels through ATen.

A kernel runs the calls one by one, without looking anything up: they are traced once when it is built, and those of a
gradient by differentiating the program then.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autotuner.ir.programmed import Programmed, programmed
from autotuner.ir.records import Call, Node
from autotuner.kernels.geometry import letter_sides
from autotuner.kernels.torch.programs import function_of, gradients

Function = Callable[[Node, Sequence[Tensor]], tuple[Tensor, ...]]


def program(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run a program on tensors in declared order; the result has the shape of its text."""
    found = programmed(node.kind, node.attributes)
    operands = [tensor.reshape(shape) for tensor, (_, shape) in zip(tensors, found.reads, strict=True)]
    return (function_of(found.program, _is_wide(found, tensors))(*operands),)


def program_grad(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Differentiate a program; inputs that are not saved are zeros, since the gradient does not read them."""
    found = programmed(node.kind, node.attributes)
    wide, (grad, *saved) = _is_wide(found, tensors), tensors
    known = dict(zip(found.program.saved, saved, strict=True))
    inputs = [
        known[place].reshape(each.shape) if place in known else _zeros(each.dtype, each.shape, grad, wide)
        for place, each in enumerate(found.program.inputs)
    ]
    return gradients(function_of(found.program, wide), found.wrt, grad, inputs)


def choice(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run a program that makes a choice, in the types of its text: in wider ones, near ties are decided in other ways.

    Where float64 is given for a narrower type, as for a reference, the result is float64 too.
    """
    found = programmed(node.kind, node.attributes)
    operands = [tensor.reshape(shape).to(getattr(torch, dtype))
                for tensor, (dtype, shape) in zip(tensors, found.reads, strict=True)]  # fmt: skip
    made = function_of(found.program)(*operands)
    return (made.double() if _is_wide(found, tensors) else made,)


def pointwise(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    found, (letters, (whole,)) = programmed(node.kind, node.attributes), letter_sides(node)
    operands = [onto(tensor, axes, whole) for tensor, axes in zip(tensors, letters, strict=True)]
    return (function_of(found.program, _is_wide(found, tensors))(*operands),)


def pointwise_grad(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Differentiate an expression; the gradient of an operand with fewer axes is summed onto these."""
    found, ((whole, *letters), (axes,)) = programmed(node.kind, node.attributes), letter_sides(node)
    wide, (grad, *saved), (place,) = _is_wide(found, tensors), tensors, found.wrt
    known = dict(zip(found.program.saved, zip(saved, letters, strict=True), strict=True))
    inputs = [
        onto(*known[number], whole) if number in known else _zeros(each.dtype, [1] * len(whole), grad, wide)
        for number, each in enumerate(found.program.inputs)
    ]
    function = function_of(found.program, wide)
    if place not in known:
        shape = [grad.shape[whole.index(axis)] if axis in axes else 1 for axis in whole]
        inputs[place] = _zeros(found.program.inputs[place].dtype, shape, grad, wide)

    def spread(*operands: Tensor) -> Tensor:
        return function(*operands).expand(grad.shape)

    (made,) = gradients(spread, found.wrt, grad, inputs)
    rest = "".join(axis for axis in whole if axis in axes)
    narrow = made.reshape([made.shape[whole.index(axis)] for axis in rest])
    return (narrow.permute([rest.index(axis) for axis in axes]),)


PROGRAMMED: Mapping[str, Function] = {
    "program": program,
    "program_grad": program_grad,
    "choice": choice,
    "pointwise": pointwise,
    "pointwise_grad": pointwise_grad,
    "pointwise_sum": pointwise_grad,
}
"""Functions that operators compute, by kind."""


def traced(
    call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], rewrite: Callable[[fx.Graph], None] | None = None
) -> Callable[[], Any]:
    """Run one operator's calls, and copy the results into the outputs, in whatever order they lie.

    Args:
        rewrite: changes the graph of what is called, once; always the same for a kernel.
    """
    (node,) = call.subgraph.nodes
    by_number = dict(zip(call.subgraph.inputs, inputs, strict=True))
    made = dict(zip(call.subgraph.outputs, outputs, strict=True))
    operands = [by_number[number] for number in node.inputs]
    steps = _steps(call, operands, rewrite)
    targets = [(place, made[number]) for place, number in enumerate(node.outputs) if number in made]

    def run() -> None:
        results = steps(*operands)
        for place, target in targets:
            target.copy_(results[place].reshape(target.shape))

    return run


_TRACED: dict[tuple[str, torch.device], fx.GraphModule] = {}


def _steps(call: Call, operands: Sequence[Tensor], rewrite: Callable[[fx.Graph], None] | None = None) -> fx.GraphModule:
    """Return the traced calls; they are traced once for each call key and process.

    They are traced in a thread of their own: a kernel may be built while compiled code runs an operator, and there
    torch's dispatcher is below autograd, or inside of a mode, so that nothing can be differentiated. All of the
    gradient is computed by that thread: else torch leaves it to the one thread that runs a device's backward, which may
    be the one that waits here.
    """
    key, (node,) = (call.key, operands[0].device), call.subgraph.nodes
    if key not in _TRACED:
        with ThreadPoolExecutor(max_workers=1) as thread:
            _TRACED[key] = thread.submit(_trace, node, operands, rewrite).result()
    return _TRACED[key]


def _trace(node: Node, operands: Sequence[Tensor], rewrite: Callable[[fx.Graph], None] | None) -> fx.GraphModule:
    mode = FakeTensorMode()
    with torch.no_grad(), torch.autograd.set_multithreading_enabled(False), mode:
        fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in operands]
        found = make_fx(lambda *each: PROGRAMMED[node.kind](node, each))(*fakes)
    if rewrite is not None:
        rewrite(found.graph)
    found.graph.eliminate_dead_code()
    found.recompile()
    return found


def onto(tensor: Tensor, axes: str, whole: str) -> Tensor:
    """Return a view of a tensor that broadcasts onto a tensor with the axes `whole`."""
    ordered = tensor.permute([axes.index(axis) for axis in whole if axis in axes])
    return ordered[tuple(slice(None) if axis in axes else None for axis in whole)]


def outside_of_band(rows: int, columns: int, band: tuple[int, int], like: Tensor) -> Tensor:
    """Return what hides keys outside of a band when it is added: (rows, columns), 0 inside and -inf outside.

    Args:
        band: so many keys before a query's own are inside, and so many behind it.
        like: a tensor of its type and device.
    """
    before, after = band
    inside = torch.ones(rows, columns, dtype=torch.bool, device=like.device).tril_(after).triu_(-before)
    return like.new_zeros(rows, columns).masked_fill_(~inside, float("-inf"))


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in float32, one of float64 as it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _is_wide(found: Programmed, tensors: Sequence[Tensor]) -> bool:
    """Tell whether float64 is given for a narrower type, so that all types inside are read as float64."""
    return any(tensor.dtype == torch.float64 and dtype != "float64"
               for tensor, (dtype, _) in zip(tensors, found.reads, strict=True))  # fmt: skip


def _zeros(dtype: str, shape: Sequence[int], like: Tensor, wide: bool) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64 if wide else getattr(torch, dtype), device=like.device)
