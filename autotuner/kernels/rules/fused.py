"""The generic fused kernels: connected sets of element-wise and normalisation operators, compiled by Inductor."""

from collections.abc import Iterator
from dataclasses import replace

from autotuner.ir.formats import FUSED, RAW, STRIDED_OF_MASKS
from autotuner.ir.kinds import KINDS
from autotuner.ir.records import LETTERS, Candidate, Subgraph
from autotuner.kernels.canonical import shared_axes
from autotuner.kernels.geometry import has_programs, may_be_stored, memory_orders, operand_numbers
from autotuner.kernels.patterns import Connected, FromResult
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
SIDE = "branch"
GRADIENTS = (("gelu_erf_grad", "gelu_erf"), ("gelu_tanh_grad", "gelu_tanh"))
FROM_RESULT = FromResult(replace(SETS, alone=frozenset(dict(GRADIENTS))), GRADIENTS, ("bfloat16",))
"""The slope is good enough of results in bfloat16; see `autotuner.kernels.torch.gelu_slope`."""


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
    read = {node.inputs[0] for node in subgraph.nodes if node.kind in dict(GRADIENTS).values()}
    found[SIDE] = [
        number for number in subgraph.outputs
        if number in read and subgraph.tensors[number].dtype in FROM_RESULT.dtypes
        and may_be_stored(subgraph, number, SIDE)
    ]  # fmt: skip
    return {storage: numbers for storage, numbers in found.items() if numbers}


def not_fusible(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say which member Inductor is not asked to fuse, or None."""
    strange = [kind for kind in subgraph.kinds if kind not in FUSIBLE]
    if strange:
        return f"{strange[0]} is not fused: {', '.join(sorted(FUSIBLE))} are"
    return not_as_declared(subgraph, candidate) if has_programs(subgraph) else None


def from_result_layouts(subgraph: Subgraph) -> Iterator[tuple[str, ...]]:
    """Enumerate those of a set that reads a result in place of an argument, of which it reads the side alone."""
    argument = argument_of(subgraph)
    for row in fused_layouts(subgraph):
        if all(":" not in text for text in row):
            yield tuple(
                stored_as(text, SIDE) if number == argument else text
                for number, text in zip(subgraph.boundary, row, strict=True)
            )


def argument_of(subgraph: Subgraph) -> int | None:
    """Return the number of the argument of GELU whose result is read as well; None where there is none."""
    made = {node.outputs[0]: node.inputs[0] for node in subgraph.nodes if node.kind in dict(GRADIENTS).values()}
    return next((made[number] for number in subgraph.inputs if number in made), None)


def no_result(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say that GELU's result is not read, or that more of its argument is than its side; or None."""
    forms = dict(zip(subgraph.boundary, candidate.forms, strict=True))
    argument = argument_of(subgraph)
    if argument not in subgraph.inputs:
        return "it computes GELU's gradient from GELU's result, and this one is not read"
    if not forms[argument].endswith(f":{SIDE}"):
        return f"of GELU's argument it reads the side, and not {forms[argument]}: write a form that ends in :{SIDE}"
    return not_fusible(subgraph, candidate)


def no_side(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say that the side of GELU's argument is read without its result, or which member is not fused; or None."""
    if any(text.endswith(f":{SIDE}") for text in candidate.forms[: len(subgraph.inputs)]):
        return "the side of GELU's argument is read beside its result by inductor_from_result alone"
    return not_fusible(subgraph, candidate)


KERNELS.add(Kernel("inductor", (), "autotuner.kernels.inductor.fused:fused", refuses=no_side, compiles=True,
                   layouts=fused_layouts, pitched=True, flat=(*FUSED, SIDE), patterns=(SETS,)),
            Kernel("inductor_from_result", (), "autotuner.kernels.inductor.fused:from_result", refuses=no_result,
                   compiles=True, consistent="autotuner.kernels.inductor.fused:fill_in_result",
                   rounds="autotuner.kernels.inductor.fused:from_rounded_result",
                   layouts=from_result_layouts, pitched=True, flat=(SIDE,), patterns=(FROM_RESULT,)))  # fmt: skip
