"""Flop and bytes of operators and graphs, known before anything is measured."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from autotuner.ir.form import Form
from autotuner.ir.formats import STORAGE_BYTES
from autotuner.ir.graph import Graph, Operator
from autotuner.ir.kinds import ELEMENT_BYTES, kind_of
from autotuner.ir.programmed import PROGRAMMED, of_operator

_ITEM_BYTES = {**ELEMENT_BYTES, **STORAGE_BYTES}


@dataclass(frozen=True, slots=True)
class Cost:
    """Flop and least bytes moved, of one operator or of several."""

    flop: int
    moved_bytes: int


def operator_flop(graph: Graph, operator: Operator) -> int:
    """Return the flop of an operator.

    It is two per element of the iteration space of a contraction, else per element of its largest operand as its kind
    states, or one for each call of its program. A transcendental function counts as one; random numbers count as none.
    """
    kind = kind_of(operator)
    if kind.operator_class == "contraction":
        return kind.flop_per_element * prod(graph.letters(operator).values())
    steps = of_operator(operator).steps if operator.kind in PROGRAMMED else kind.flop_per_element
    return steps * max(graph.elements(tensor) for tensor, _ in operator.operands)


def tensor_bytes(graph: Graph, tensor: str) -> int:
    """Return the bytes of a tensor in its own dtype."""
    return graph.elements(tensor) * ELEMENT_BYTES[graph.tensors[tensor].dtype]


def largest_end(graph: Graph) -> tuple[str, int]:
    """Return the largest of the tensors that go into a graph or come out of it, and its bytes: each must be somewhere.

    Of a tensor in between, this is not known: a fused kernel may never write it.
    """
    ends = [name for name, tensor in graph.tensors.items() if tensor.role in ("input", "parameter")] + [*graph.outputs]
    largest = max(ends, key=lambda name: tensor_bytes(graph, name))
    return largest, tensor_bytes(graph, largest)


def form_bytes(graph: Graph, tensor: str, text: str) -> int:
    """Return the bytes of a tensor in a form: none where it is absent, of a slice of a stack its own only."""
    form, declared = Form.parse(text), graph.tensors[tensor]
    if form.is_absent:
        return 0
    lies = form.stored(declared.dtype, declared.axes, graph.shape(tensor))
    return prod(lies.extents) * _ITEM_BYTES[lies.dtype]


def working_set_bytes(graph: Graph) -> int:
    """Return the bytes of all tensors of a graph, each once: what one step touches."""
    return sum(tensor_bytes(graph, name) for name, tensor in graph.tensors.items() if not tensor.optional)


def fused_bytes(graph: Graph, covers: Iterable[tuple[Iterable[str], Iterable[str]]]) -> int:
    """Return the bytes that kernels move which read and write just the stated tensors, each once per kernel.

    Args:
        covers: per kernel, names of the tensors that it reads and of those that it writes.
    """
    return sum(
        tensor_bytes(graph, tensor)
        for inputs, outputs in covers
        for tensor in (*dict.fromkeys(inputs), *dict.fromkeys(outputs))
    )


def moved_bytes(graph: Graph, steps: Iterable[Iterable[tuple[str, str]]]) -> int:
    """Return the bytes that kernels move which read and write just the stated tensors, each once per kernel.

    Args:
        steps: per kernel, the tensors that it reads and writes with the forms that they have.
    """
    return sum(form_bytes(graph, *operand) for operands in steps for operand in dict.fromkeys(operands))


def reduction(unfused: float, chosen: float) -> float:
    """Return by how many percent `chosen` lies below `unfused`."""
    return 100 * (1 - chosen / unfused)
