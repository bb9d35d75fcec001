"""RMS norm and its gradients through torch's own calls. Row by row values keep the type of the statistic."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from autotuner.ir.records import Call
from autotuner.kernels.geometry import operand_letters
from autotuner.kernels.torch.elementwise import Run, spread

Operands = Sequence[Tensor]


def rms_norm(call: Call, inputs: Operands, outputs: Operands) -> Run:
    """The norm of each row makes the statistic; x times that makes y, which is scaled in place."""
    (node,) = call.subgraph.nodes
    whole, *narrow, _, rest = operand_letters(node)
    (x, *scale), (y, reciprocal_root) = inputs, outputs
    axes = [place for place, letter in enumerate(whole) if letter not in rest]
    count, epsilon = prod(x.shape[axis] for axis in axes), float(dict(node.attributes)["epsilon"])
    root = spread(reciprocal_root, rest, whole, x.shape)
    vector = spread(scale[0], narrow[0], whole, x.shape) if scale else None
    rows = reciprocal_root.permute([rest.index(letter) for letter in whole if letter in rest])

    def run() -> None:
        torch.linalg.vector_norm(x, 2, axes, dtype=rows.dtype, out=rows)
        rows.square_().div_(count).add_(epsilon).rsqrt_()
        torch.mul(x, root, out=y)
        if vector is not None:
            y.mul_(vector)

    return run


def rms_norm_grad_input(call: Call, inputs: Operands, outputs: Operands) -> Run:
    """r * (s - x * r**2 * mean(s * x)), where s is the scaled gradient, r the statistic and the mean that of a row.

    The products s * x are scratch of every call.
    """
    (node,) = call.subgraph.nodes
    whole, _, *narrow, rest, _ = operand_letters(node)
    grad, x, *scale, reciprocal_root = read_by(call, inputs)
    (out,) = outputs
    axes = [place for place, letter in enumerate(whole) if letter not in rest]
    count = prod(x.shape[axis] for axis in axes)
    root = spread(reciprocal_root, rest, whole, x.shape)
    vector = spread(scale[0], narrow[0], whole, x.shape) if scale else None
    rows = root[tuple(slice(None) if letter in rest else slice(0, 1) for letter in whole)]

    def run() -> None:
        if vector is None:
            out.copy_(grad)
        else:
            torch.mul(grad, vector, out=out)
        along = torch.mul(out, x).sum(axes, keepdim=True, dtype=rows.dtype)
        along.mul_(rows).mul_(rows)
        out.addcmul_(x, along, value=-1 / count)
        out.mul_(root)

    return run


def rms_norm_grad_parameters(call: Call, inputs: Operands, outputs: Operands) -> Run:
    """The gradient times x times the statistic, summed over rows; the products are scratch of every call."""
    (node,) = call.subgraph.nodes
    whole, _, rest, narrow = operand_letters(node)
    grad, x, reciprocal_root = read_by(call, inputs)
    (out,) = outputs
    summed = [axis for axis, letter in enumerate(whole) if letter not in narrow]
    target = out.permute([narrow.index(letter) for letter in whole if letter in narrow])
    root = spread(reciprocal_root, rest, whole, x.shape)
    return lambda: torch.sum(torch.mul(grad, x).mul_(root), summed, out=target)


def read_by(call: Call, inputs: Operands) -> list[Tensor]:
    """Return what a call reads, in the order of its spec."""
    (node,) = call.subgraph.nodes
    return [inputs[call.subgraph.inputs.index(number)] for number in node.inputs]
