"""Conversions: a tensor copied from one form to another, measured like any other operator.

A conversion changes the memory order, or the storage format of a dropout mask, never both. One that changes the storage
format carries the p of the mask: raw masks hold 0 and 1 / (1 - p), and a seed stands for a mask only together with p.
"""

from collections.abc import Iterable
from functools import partial

from autotuner.errors import KernelError
from autotuner.ir.form import SAVING, Form
from autotuner.ir.graph import Graph
from autotuner.ir.kinds import draws
from autotuner.ir.records import Candidate, Node, Subgraph, TensorType
from autotuner.kernels.geometry import forms_by_number, operand_strides
from autotuner.kernels.registry import KERNELS, Kernel, Refuses

KIND = "conversion"

_COPY = "autotuner.kernels.torch.elementwise:copy"
_MASKS = "autotuner.kernels.inductor.conversion"

PACKED = (("raw", "bit"), ("byte", "bit"))
UNPACKED = (("bit", "raw"), ("bit", "byte"))
EXPANDED = (("seed", "raw"), ("seed", "byte"))
CAST = (("raw", "byte"), ("byte", "raw"))
STORAGE_CHANGES = frozenset(PACKED + UNPACKED + EXPANDED + CAST)
"""Pairs of storage formats of a mask between which a conversion leads."""


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
        KernelError: the storage format changes, and the tensor is no dropout mask.
    """
    tensor = TensorType(graph.shape(name), graph.tensors[name].dtype)
    if Form.parse(source).storage == Form.parse(target).storage:
        return conversion(tensor)
    if not is_mask(graph, name):
        raise KernelError(
            f"tensor {name!r} cannot go from {source} to {target}: only dropout masks change their storage"
        )
    return conversion(tensor, float(graph.producers[name].attribute("p")))


def is_mask(graph: Graph, name: str) -> bool:
    """Tell whether a tensor of a graph is a dropout mask."""
    return name in graph.producers and draws(graph.producers[name].kind)


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
        said = f"{forms[0]} to {forms[1]}"
        if (forms[0].storage, forms[1].storage) not in allowed:
            return f"{said}: it leads from {known}"
        if forms[0].layout != forms[1].layout:
            return f"{said}: the storage format changes in one memory order"
        if forms[0].stack or forms[1].stack:
            return f"{said}: the storage format of a slice of a stack stays"
        if "p" not in dict(subgraph.nodes[0].attributes):
            return f"{said}: the record does not say the p of the mask"
        return None

    return refuses


_masks = partial(Kernel, covers=(KIND,), compiles=True, flat=SAVING)
KERNELS.add(
    Kernel("torch_copy", (KIND,), _COPY, refuses=nothing_to_convert, version=2, pitched=True),
    _masks("inductor_pack", runs=f"{_MASKS}:pack", refuses=_only(PACKED)),
    _masks("inductor_unpack", runs=f"{_MASKS}:unpack", refuses=_only(UNPACKED)),
    _masks("inductor_expand", runs=f"{_MASKS}:expand", refuses=_only(EXPANDED)),
    _masks("inductor_cast", runs=f"{_MASKS}:cast", refuses=_only(CAST), flat=()),
)
