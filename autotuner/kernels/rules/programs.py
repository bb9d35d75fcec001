"""Kernels of operators that carry a program, through ATen: programs in declared order, expressions in any order."""

from autotuner.ir.programmed import CHOICE, WITH_SHAPES
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
for _kind in WITH_SHAPES:
    KERNELS.add(Kernel(f"torch_{_kind}", (_kind,), _BUILDER, not_as_declared, version=2 if _kind == CHOICE else 1))
for _kind in ("pointwise", "pointwise_grad", "pointwise_sum"):
    KERNELS.add(Kernel(f"torch_{_kind}", (_kind,), _BUILDER, layouts_differ, layouts=same_layouts, pitched=True))
