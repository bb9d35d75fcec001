"""The inputs and parameters of a region that get no gradient from an output, as by torch's autograd.

A plan makes zeros for a threshold that is only compared, while torch leaves its gradient None. Zeros would be another
training: an optimizer decays what has them, and moves it by what earlier steps have left.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch._subclasses import FakeTensorMode

from autotuner.ir.autodiff import gradient_of
from autotuner.ir.device import CPU
from autotuner.ir.graph import Graph, Operator
from autotuner.ir.program import parse_program
from autotuner.ir.programmed import CHOICE, GRADIENTS
from autotuner.kernels.torch.programs import FLOATS, function_of


def unreached(graph: Graph, outputs: Sequence[str], sources: Sequence[Sequence[str]]) -> tuple[tuple[int, ...], ...]:
    """Return, for each output of a forward graph, the places of the sources that its gradient does not reach.

    Args:
        outputs: tensors that the graph makes.
        sources: its inputs and parameters, those together that are parts of one tensor of the caller's.
    """
    return tuple(
        tuple(place for place, members in enumerate(sources) if found.isdisjoint(members))
        for found in (_reached(graph, output) for output in outputs)
    )


def _reached(graph: Graph, output: str) -> set[str]:
    """Return the tensors that the gradient of a tensor reaches."""
    found, waiting = {output}, [output]
    while waiting:  # each turn takes a tensor that was found
        tensor = waiting.pop()
        operator = graph.producers.get(tensor)
        if operator is None or tensor != operator.outputs[0]:
            continue  # statistics and masks have no gradient
        read = {operator.inputs[place] for place in _passing(operator)}
        waiting += read - found
        found |= read
    return found


def _passing(operator: Operator) -> Sequence[int]:
    """Return the places of an operator's inputs that get a gradient from its first output."""
    if operator.kind == CHOICE or not operator.inputs:
        return ()
    if operator.kind in GRADIENTS:
        return _passing_program(str(operator.attribute("program")))
    derived = gradient_of(operator)(operator, "")
    return [place for each in derived for place in (each.wrt if isinstance(each.wrt, tuple) else (each.wrt,))]


@lru_cache(maxsize=4096)
def _passing_program(text: str) -> tuple[int, ...]:
    """Return the inputs of a program to which autograd finds a way; nothing is computed."""
    from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing

    program = parse_program(text)
    if not program.wanted:
        return ()
    with (
        torch.inference_mode(False), torch.enable_grad(), torch._C._DisableAutocast(), FakeTensorMode(),
        _disable_saved_tensors_hooks_during_tracing(),
    ):  # fmt: skip
        operands = [
            torch.empty(each.shape or (2,), dtype=FLOATS[each.dtype], device=CPU, requires_grad=each.wanted)
            for each in program.inputs
        ]
        made = function_of(program)(*operands)
        if not made.requires_grad:
            return ()
        wanted = [operands[place] for place in program.wanted]
        found = torch.autograd.grad(made, wanted, torch.empty_like(made), allow_unused=True)
    return tuple(place for place, gradient in zip(program.wanted, found, strict=True) if gradient is not None)
