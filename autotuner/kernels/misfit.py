"""Calls that come from a file, where anything may stand."""

from collections import Counter

import autotuner.kernels.rules  # noqa: F401  (registers every kernel)
from autotuner.errors import AutotunerError
from autotuner.ir.records import Call
from autotuner.kernels.registry import KERNELS


def misfit(call: Call) -> str | None:
    """Say why a call cannot run by the rules of its kernel, which must be known, or None if it can."""
    subgraph, candidate = call.subgraph, call.candidate
    kernel = KERNELS[candidate.kernel]
    wrong = f"{kernel.name} does not compute {' + '.join(subgraph.kinds)} from operands like these"
    if not Counter(kernel.covers) <= Counter(subgraph.kinds):  # operators that it repeats come on top
        return wrong
    try:
        for number, form in zip(subgraph.boundary, candidate.parsed_forms(), strict=True):
            tensor = subgraph.tensors[number]
            if form.storage != "absent":
                form.stored(tensor.dtype, tensor.axes, tensor.extents)
        reason = kernel.refuses(subgraph, candidate)
    except AutotunerError as error:
        return str(error)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, StopIteration, TypeError, ValueError):
        return wrong  # the rule was asked about what its kernel does not cover
    return reason and f"{kernel.name} cannot run: {reason}"
