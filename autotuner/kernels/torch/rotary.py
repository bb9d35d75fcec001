"""Rotary embeddings and their gradient through torch's own calls."""

from collections.abc import Sequence

import torch
from torch import Tensor

from autotuner.ir.records import Call
from autotuner.kernels.geometry import operand_letters
from autotuner.kernels.torch.elementwise import Run, spread


def rotary(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """x * cos in one pass; each half of it then adds the other half of x times its own sines."""
    return _turning(call, inputs, outputs, back=False)


def rotary_grad(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """Gradient * cos; each half then adds the other half of the gradient times that half's sines."""
    return _turning(call, inputs, outputs, back=True)


def _turning(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, back: bool) -> Run:
    x, cos, sin, y = _operands(call, inputs, outputs)
    first, second = halves(call, x)
    first_out, second_out = halves(call, y)
    sines = halves(call, sin)
    of_first, of_second = reversed(sines) if back else sines
    sign = -1 if back else 1

    def run() -> None:
        torch.mul(x, cos, out=y)
        first_out.addcmul_(second, of_first, value=-sign)
        second_out.addcmul_(first, of_second, value=sign)

    return run


def halves(call: Call, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """View the two halves of a tensor with the axes of X."""
    (node,) = call.subgraph.nodes
    first, second = tensor.chunk(2, operand_letters(node)[0].index(str(dict(node.attributes)["axis"])))
    return first, second


def _operands(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, cosines and sines, seen with the axes of x, and the output."""
    (node,) = call.subgraph.nodes
    x, cos, sin = (inputs[call.subgraph.inputs.index(number)] for number in node.inputs)
    whole, cos_letters, sin_letters = operand_letters(node)[:3]
    return x, spread(cos, cos_letters, whole, x.shape), spread(sin, sin_letters, whole, x.shape), outputs[0]
