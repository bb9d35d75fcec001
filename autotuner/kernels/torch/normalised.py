"""Normalised inputs that norms keep, and gradients from these, by torch's own calls; see `autotuner.ir.autodiff`."""

from math import prod

import torch

from autotuner.ir.records import Call
from autotuner.kernels.geometry import operand_letters
from autotuner.kernels.torch.elementwise import Run, spread
from autotuner.kernels.torch.rms_norm import Operands, read_by


def normalised(call: Call, inputs: Operands, outputs: Operands) -> Run:
    """(x - mean) times the statistic, rounded to the result's type; the difference is scratch of every call."""
    (node,) = call.subgraph.nodes
    whole, *_, rest, _ = operand_letters(node)
    x, *mean, reciprocal = read_by(call, inputs)
    (out,) = outputs
    factor = spread(reciprocal, rest, whole, x.shape)
    shift = spread(mean[0], rest, whole, x.shape) if mean else None

    def run() -> None:
        torch.mul(x if shift is None else x - shift, factor, out=out)

    return run


def normalised_grad_input(call: Call, inputs: Operands, outputs: Operands) -> Run:
    """r (s - n mean(s n) - mean(s)), where s is the scaled gradient, n what was normalised, r the statistic, and the
    means those of a row; the last one is left out of an RMS norm.

    The products s n are scratch of every call.
    """
    (node,) = call.subgraph.nodes
    whole, _, *narrow, rest, _ = operand_letters(node)
    grad, normal, *scale, reciprocal = read_by(call, inputs)
    (out,) = outputs
    axes = [place for place, letter in enumerate(whole) if letter not in rest]
    count = prod(grad.shape[axis] for axis in axes)
    factor = spread(reciprocal, rest, whole, grad.shape)
    vector = spread(scale[0], narrow[0], whole, grad.shape) if scale else None
    centred = bool(dict(node.attributes)["centred"])

    def run() -> None:
        if vector is None:
            out.copy_(grad)
        else:
            torch.mul(grad, vector, out=out)
        along = torch.mul(out, normal).sum(axes, keepdim=True)
        if centred:
            out.sub_(out.mean(axes, keepdim=True))
        out.addcmul_(normal.to(out.dtype), along, value=-1 / count)
        out.mul_(factor)

    return run


def normalised_grad_parameters(call: Call, inputs: Operands, outputs: Operands) -> Run:
    """The gradient times what was normalised, and the gradient alone, summed over rows; products are scratch."""
    (node,) = call.subgraph.nodes
    whole, _, *narrow = operand_letters(node)
    grad, normal = read_by(call, inputs)
    summed = [axis for axis, letter in enumerate(whole) if letter not in narrow[0]]
    targets = [
        out.permute([letters.index(letter) for letter in whole if letter in letters])
        for out, letters in zip(outputs, narrow, strict=True)
    ]

    def run() -> None:
        torch.sum(torch.mul(grad, normal), summed, out=targets[0])
        for target in targets[1:]:
            torch.sum(grad, summed, out=target)

    return run
