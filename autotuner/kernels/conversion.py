"""Conversions: a tensor copied from one form to another, measured like any other operator."""

from autotuner.kernels.geometry import forms_by_number, operand_strides
from autotuner.kernels.registry import KERNELS, Kernel
from autotuner.records import Candidate, Node, Subgraph, TensorType

KIND = "conversion"


def conversion(tensor: TensorType) -> Subgraph:
    """Return the record of copying a tensor; the candidate's forms say from what to what."""
    axes = tensor.axes
    return Subgraph((Node(KIND, f"{axes}->{axes}", (0,), (1,)),), (tensor, tensor), (0,), (1,))


def nothing_to_convert(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say that both forms are the same, or None where there is something to do."""
    forms = forms_by_number(subgraph, candidate)
    if forms[0].storage != forms[1].storage:
        return f"{forms[0]} to {forms[1]}: a conversion changes the layout, not the storage format"
    source, target = operand_strides(subgraph, subgraph.nodes[0], forms)
    return f"{forms[0]} to {forms[1]}: the tensor already lies so" if source == target else None


KERNELS.add(Kernel("torch_copy", (KIND,), "autotuner.kernels.torch_cpu.conversion:copy", refuses=nothing_to_convert,
                   version=2, pitched=True))  # fmt: skip
