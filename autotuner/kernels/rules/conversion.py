"""Conversions: a tensor copied from one form to another, measured like any other operator.

A conversion changes the memory order, or the storage format, never both. One that changes the storage format of a
dropout mask carries its p: raw masks hold 0 and 1 / (1 - p), and a seed stands for a mask only together with p.
"""

from collections.abc import Iterable
from functools import lru_cache, partial

from autotuner.errors import KernelError
from autotuner.ir.form import Form
from autotuner.ir.formats import FLAT, StorageFormat
from autotuner.ir.graph import Graph
from autotuner.ir.kinds import draws
from autotuner.ir.records import Candidate, Node, Subgraph, TensorType
from autotuner.kernels.geometry import forms_by_number, operand_strides
from autotuner.kernels.registry import KERNELS, Kernel, Refuses

KIND = "conversion"

_COPY = "autotuner.kernels.torch.elementwise:copy"
_CHANGING = "autotuner.kernels.inductor.conversion"

PACKED = (("raw", "bit"), ("byte", "bit"))
UNPACKED = (("bit", "raw"), ("bit", "byte"))
EXPANDED = (("seed", "raw"), ("seed", "byte"))
CAST = (("raw", "byte"), ("byte", "raw"))
SIGNS = (("raw", "sign"),)
QUANTIZED = (("raw", "int8"),)
DEQUANTIZED = (("int8", "raw"),)
STORAGE_CHANGES = frozenset(PACKED + UNPACKED + EXPANDED + CAST + SIGNS + QUANTIZED + DEQUANTIZED)
"""Pairs of storage formats between which a conversion leads."""


@lru_cache(maxsize=1 << 10)  # a space asks thousands of times, of a dozen types
def conversion(tensor: TensorType, p: float | None = None) -> Subgraph:
    """Return the record of copying a tensor; the candidate's forms say from what to what.

    Args:
        tensor: extents and element type.
        p: the share that a dropout mask drops, where its storage format changes; None elsewhere.
    """
    axes = tensor.axes
    attributes = () if p is None else (("p", p),)
    return Subgraph((Node(KIND, f"{axes}->{axes}", (0,), (1,), attributes),), (tensor, tensor), (0,), (1,))


def conversion_of(graph: Graph, name: str, source: str, target: str) -> Subgraph:
    """Return the record of converting a tensor of a graph from one form to another.

    Raises:
        KernelError: the storage format changes, and the tensor may not have the one or the other.
    """
    tensor = TensorType(graph.shape(name), graph.tensors[name].dtype)
    if Form.parse(source).storage == Form.parse(target).storage:
        return conversion(tensor)
    for text in (source, target):
        if not may_have(graph, name, text):
            declared = Form.parse(text).format
            places = f"only operands of {' and '.join(declared.operands)} are stored as a {declared.name}"
            if declared.numerics != "exact":
                places = f"backward reads it where {declared.name} may not stand for it, or not at all"
            raise KernelError(f"tensor {name!r} cannot go from {source} to {target}: {places}")
    producer = graph.producers.get(name)
    return conversion(tensor, float(producer.attribute("p")) if producer and draws(producer.kind) else None)


def may_have(graph: Graph, name: str, form: str) -> bool:
    """Tell whether a tensor of a graph may have a form, by the operator that makes it; inputs are raw."""
    declared = Form.parse(form).format
    if declared.numerics != "exact":
        return may_differ(graph, name, declared)
    if not declared.operands or name not in graph.producers:
        return not declared.operands
    producer = graph.producers[name]
    return declared.admits(producer.kind, len(producer.inputs) + producer.outputs.index(name))


def may_differ(graph: Graph, name: str, declared: StorageFormat) -> bool:
    """Tell whether backward may have an activation as a format that is not exact.

    All that backward makes of it must be at places that the format admits, also what it makes of operators of forward
    that it runs again. Products with a parameter are never run again.
    """
    if name not in graph.saved or graph.tensors[name].role != "activation":
        return False
    left, seen = [name], {name}
    while left:
        tensor = left.pop()
        for operator in graph.consumers[tensor]:
            forward = operator.phase == "forward"
            if forward and operator.kind == "contraction" and any(map(graph.is_weight, operator.inputs)):
                continue
            places = (place for place, each in enumerate(operator.inputs) if each == tensor)
            if not all(declared.admits(operator.kind, place) for place in places):
                return False
            if forward:
                left += [made for made in operator.outputs if made not in seen]
                seen.update(operator.outputs)
    return True


def nothing_to_convert(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say that both forms are the same, or None where there is something to do."""
    forms = forms_by_number(subgraph, candidate)
    if forms[0].storage != forms[1].storage:
        return f"{forms[0]} to {forms[1]}: a copy changes the layout, not the storage format"
    source, target = operand_strides(subgraph, subgraph.nodes[0], forms)
    return f"{forms[0]} to {forms[1]}: the tensor already lies so" if source == target else None


def _only(pairs: Iterable[tuple[str, str]]) -> Refuses:
    """Return the rule of a kernel that leads between these storage formats."""
    allowed = tuple(pairs)
    known = ", ".join(f"{source} to {target}" for source, target in allowed)

    def refuses(subgraph: Subgraph, candidate: Candidate) -> str | None:
        forms = forms_by_number(subgraph, candidate)
        reason = why_not(subgraph, forms[0], forms[1])
        return reason and f"{forms[0]} to {forms[1]}: {reason}"

    def why_not(subgraph: Subgraph, source: Form, target: Form) -> str | None:
        if (source.storage, target.storage) not in allowed:
            return f"it leads from {known}"
        if source.layout != target.layout:
            return "the storage format changes in one memory order"
        if source.stack or target.stack:
            return "the storage format of a slice of a stack stays"
        masks = source.format.is_of_masks or target.format.is_of_masks
        if masks and "p" not in dict(subgraph.nodes[0].attributes):
            return "the record does not say the p of the mask"
        return None

    return refuses


_changing = partial(Kernel, covers=(KIND,), compiles=True, flat=FLAT)
KERNELS.add(
    Kernel("torch_copy", (KIND,), _COPY, refuses=nothing_to_convert, version=2, pitched=True),
    _changing("inductor_pack", runs=f"{_CHANGING}:pack", refuses=_only(PACKED)),
    _changing("inductor_unpack", runs=f"{_CHANGING}:unpack", refuses=_only(UNPACKED)),
    _changing("inductor_expand", runs=f"{_CHANGING}:expand", refuses=_only(EXPANDED)),
    _changing("inductor_cast", runs=f"{_CHANGING}:cast", refuses=_only(CAST), flat=()),
    _changing("inductor_pack_signs", runs=f"{_CHANGING}:pack_signs", refuses=_only(SIGNS)),
    _changing("inductor_quantize", runs=f"{_CHANGING}:quantize", refuses=_only(QUANTIZED)),
    _changing("inductor_dequantize", runs=f"{_CHANGING}:dequantize", refuses=_only(DEQUANTIZED)),
)
