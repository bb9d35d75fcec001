"""The generic fused kernel: a connected set of element-wise and normalisation operators, compiled by Inductor."""

from collections.abc import Iterator

from autotuner.ir.formats import FUSED, RAW, STRIDED_OF_MASKS
from autotuner.ir.kinds import KINDS
from autotuner.ir.records import LETTERS, Candidate, Subgraph
from autotuner.kernels.canonical import shared_axes
from autotuner.kernels.geometry import has_programs, may_be_stored, memory_orders, operand_numbers
from autotuner.kernels.patterns import Connected
from autotuner.kernels.registry import KERNELS, Kernel, declared_layouts
from autotuner.kernels.rules.elementwise import dropout_masks, stored_as, vectors
from autotuner.kernels.rules.programs import not_as_declared

FUSIBLE = frozenset(kind.name for kind in KINDS.values() if kind.fusible)
SETS = Connected(
    FUSIBLE,
    alone=frozenset(kind.name for kind in KINDS.values() if kind.fused_alone),
    without=(
        frozenset(),
        frozenset({"bias"}),  # which a product's own kernel can add
        frozenset(name for name in FUSIBLE if not KINDS[name].keeps_axes),  # whose sums run along another axis
        frozenset({"program", "program_grad"}),  # which may be more than the compiler fuses well
        FUSIBLE - {"pointwise_sum"},  # sums of one gradient, read once
    ),
)
"""Few enough to compile them all."""


def global_letters(subgraph: Subgraph) -> dict[int, str]:
    """Return each tensor's axes written in letters shared by the whole subgraph: equal letter, same axis."""
    axes = shared_axes(subgraph)
    read = (number for node in subgraph.nodes for number in operand_numbers(node))
    return {number: "".join(LETTERS[axis] for axis in axes[number]) for number in read}


def kept_as_declared(subgraph: Subgraph) -> set[int]:
    """Return the tensors that keep their declared order: vectors, and what casts make of them, or make them of."""
    fixed = set[int]().union(*(vectors(node) for node in subgraph.nodes))
    for node in (*subgraph.nodes, *reversed(subgraph.nodes)):
        if node.kind == "cast" and fixed.intersection(operand_numbers(node)):
            fixed.update(operand_numbers(node))
    return fixed


def fused_layouts(subgraph: Subgraph) -> Iterator[tuple[str, ...]]:
    """Enumerate memory orders of the widest operand; the others follow it, parameters stay as declared.

    Masks are tried in each format with strides, other tensors raw and in each format that is fused. Where one of the
    operators is a program, all stay as declared.
    """
    if has_programs(subgraph):
        yield from declared_layouts(subgraph)
        return
    letters = global_letters(subgraph)
    lead = max(letters.values(), key=len)
    masks = dropout_masks(subgraph) & set(subgraph.boundary)
    fixed = kept_as_declared(subgraph)
    of_masks = [dict.fromkeys(masks, storage) for storage in (STRIDED_OF_MASKS if masks else (RAW,))]
    of_others = [dict.fromkeys(numbers, storage) for storage, numbers in fused_formats(subgraph).items()]
    for order in memory_orders(lead):
        layouts = {}
        for number in subgraph.boundary:
            own, axes = letters[number], subgraph.tensors[number].axes
            kept = own if number in fixed else "".join(x for x in order if x in own)
            layouts[number] = kept.translate(str.maketrans(own, axes))
        for chosen in (mask | other for other in ({}, *of_others) for mask in of_masks):
            yield tuple(stored_as(layouts[number], chosen.get(number, RAW)) for number in subgraph.boundary)


def fused_formats(subgraph: Subgraph) -> dict[str, list[int]]:
    """Return the formats that are fused, each with the boundary tensors that may be stored so."""
    found = {
        storage: [number for number in subgraph.boundary if may_be_stored(subgraph, number, storage)]
        for storage in FUSED
    }
    return {storage: numbers for storage, numbers in found.items() if numbers}


def not_fusible(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say which member Inductor is not asked to fuse, or None."""
    strange = [kind for kind in subgraph.kinds if kind not in FUSIBLE]
    if strange:
        return f"{strange[0]} is not fused: {', '.join(sorted(FUSIBLE))} are"
    return not_as_declared(subgraph, candidate) if has_programs(subgraph) else None


KERNELS.add(Kernel("inductor", (), "autotuner.kernels.inductor.fused:fused", refuses=not_fusible, compiles=True,
                   layouts=fused_layouts, pitched=True, flat=FUSED, patterns=(SETS,)))  # fmt: skip
