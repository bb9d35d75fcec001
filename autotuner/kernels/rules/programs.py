"""Kernels of operators that carry a program, through ATen: programs in declared order, expressions in any order."""

from functools import partial

from autotuner.ir.records import Candidate, Subgraph
from autotuner.kernels.geometry import forms_by_number
from autotuner.kernels.registry import KERNELS, Kernel
from autotuner.kernels.rules.elementwise import layouts_differ, same_layouts


def not_as_declared(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say which tensor does not lie dense in declared order, or None."""
    for number, form in forms_by_number(subgraph, candidate).items():
        if str(form) != subgraph.tensors[number].axes:
            return f"a program reads and makes tensors as they are declared; tensor {number} lies as {form}"
    return None


_BUILDER = "autotuner.kernels.torch.programmed:traced"
_ADDING_ROWS = "autotuner.kernels.triton.added_rows:traced"
"""The same, but for rows that are added to a table."""
_expression = partial(Kernel, runs=_BUILDER, refuses=layouts_differ, layouts=same_layouts, pitched=True)
KERNELS.add(
    Kernel("torch_program", ("program",), _BUILDER, not_as_declared),
    Kernel("torch_program_grad", ("program_grad",), _ADDING_ROWS, not_as_declared, version=2),
    Kernel("torch_choice", ("choice",), _BUILDER, not_as_declared, version=2),
    _expression("torch_pointwise", ("pointwise",)),
    _expression("torch_pointwise_grad", ("pointwise_grad",)),
    _expression("torch_pointwise_sum", ("pointwise_sum",)),
)
