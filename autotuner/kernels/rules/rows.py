"""Fused sets as rows and columns: element-wise operators, norms over rows, and sums over columns, in one kernel.

All full operands lie in one memory order, of which the last axes are the columns: those of biases, scales and their
gradients, which a norm also runs along. All axes before are the rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Literal

from autotuner.ir.form import Form
from autotuner.ir.formats import BITS, FLAT, FORMATS, RAW, StorageFormat
from autotuner.ir.kinds import KINDS
from autotuner.ir.records import Candidate, Node, Scalar, Subgraph
from autotuner.kernels.geometry import (
    forms_by_number,
    letter_sides,
    may_be_stored,
    memory_orders,
    merge,
    operand_numbers,
)
from autotuner.kernels.patterns import Connected, Siblings
from autotuner.kernels.registry import KERNELS, Kernel
from autotuner.kernels.rules.elementwise import dropout_masks, stored_as
from autotuner.kernels.rules.fused import global_letters, kept_as_declared
from autotuner.kernels.rules.stacked import stacked_vector_layouts

FUSED = frozenset(kind.name for kind in KINDS.values() if kind.by_rows)
SUMS = frozenset(name for name in FUSED if not KINDS[name].keeps_axes)
"""Kinds whose results are sums over rows."""
NORMS = frozenset({"layer_norm", "layer_norm_grad_input", "rms_norm", "rms_norm_grad_input", "normalised_grad_input"})
"""Kinds that reduce along a row."""
DTYPES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}

VECTORS = (1, 2, 4, 8)
MOST_THREADS = 1024
FEWEST_THREADS = 64
MOST_ELEMENTS = 64
"""Of one operand that a thread keeps in registers."""
MOST_BARRIERS = 15
"""Groups of a block that wait for their own threads only, where a row takes more than one warp."""
WARP = 32
SHARED_BYTES = 40_960
SUM_BYTES = 4
FLAT_COLUMNS = 8192
"""Purely element-wise sets are cut into rows of so many elements at most."""

PACKED = tuple(name for name in FLAT if FORMATS[name].has_bits)
"""Formats that it reads and writes beside those with strides."""
MASKS = "bit"
"""That of the masks which kernels by rows draw for each other."""

Place = Literal["full", "row", "column"]


@dataclass(frozen=True, slots=True)
class RowOperand:
    """A boundary tensor: whether it has rows and columns or one of them, and where it lies.

    Args:
        pitch: elements from row to row, of a full one.
        offset: elements before the first, in a stack.
    """

    place: Place
    format: StorageFormat
    pitch: int
    offset: int


@dataclass(frozen=True, slots=True)
class RowTable:
    """A set of operators as work on a table of `rows` by `columns`; operands by tensor number."""

    rows: int
    columns: int
    operands: Mapping[int, RowOperand]
    normalises: bool


@dataclass(frozen=True, slots=True)
class RowLaunch:
    """Launch parameters: threads that share a row, rows of a block at once, elements of one load, blocks on one
    multiprocessor, and rows that a thread loads before it computes."""

    threads: int = 128
    rows: int = 2
    vector: int = 8
    blocks: int = 4
    unroll: int = 1

    @classmethod
    def of(cls, params: tuple[tuple[str, Scalar], ...]) -> "RowLaunch":
        return cls(**{name: int(value) for name, value in params})

    def chunks(self, table: RowTable) -> int:
        """Return how many vectors of a row a thread holds: all that it has to where a norm needs the whole row."""
        return -(-table.columns // (self.threads * self.vector)) if table.normalises else 1

    def tiles(self, table: RowTable) -> int:
        """Return into how many tiles the columns are cut."""
        return -(-table.columns // (self.threads * self.vector * self.chunks(table)))


def as_rows(subgraph: Subgraph, candidate: Candidate) -> RowTable | str:
    """See a fused set as work on a table, or say in a sentence why it is none."""
    return _seen_as_rows(subgraph, candidate.forms)


@lru_cache(maxsize=256)  # rules are asked once for each combination of launch parameters
def _seen_as_rows(subgraph: Subgraph, texts: tuple[str, ...]) -> RowTable | str:
    strange = [kind for kind in subgraph.kinds if kind not in FUSED]
    if strange:
        return f"{strange[0]} is not fused by rows: {', '.join(sorted(FUSED))} are"
    sums = sums_of(subgraph)
    if any(node.kind != "cast" and not sums.keys().isdisjoint(node.inputs) for node in subgraph.nodes):
        return "it reads what is a sum over rows"
    forms = forms_by_number(subgraph, Candidate("", texts))
    found: RowTable | None = None
    for nodes in _components(subgraph):
        table = _table(subgraph, nodes, forms)
        if isinstance(table, str):
            return table
        if found is not None and (found.rows, found.columns) != (table.rows, table.columns):
            return "its members have different rows or columns"
        operands = {**(found.operands if found else {}), **table.operands}
        found = RowTable(
            table.rows, table.columns, operands, table.normalises or (found is not None and found.normalises)
        )
    assert found is not None
    return found


def sums_of(subgraph: Subgraph) -> dict[int, int]:
    """Return the tensors that are sums over rows, and casts of such, each with the sum that it is or is made from."""
    found: dict[int, int] = {}
    for node in subgraph.nodes:
        if node.kind in SUMS:
            found |= {number: number for number in node.outputs}
        elif node.kind == "cast" and node.inputs[0] in found:
            found[node.outputs[0]] = found[node.inputs[0]]
    return found


def places_of(nodes: Sequence[Node]) -> dict[int, Place]:
    """Return whether tensors have rows and columns or one of them; a cast changes nothing about that."""
    places: dict[int, Place] = {}
    for node in nodes:
        sides = KINDS[node.kind].sides(*letter_sides(node))
        for symbol, number in zip(sides[0] + sides[1], operand_numbers(node), strict=False):
            if node.kind != "cast":
                places[number] = "full" if symbol in "XMN" else "row" if symbol == "R" else "column"
    casts = [operand_numbers(node) for node in nodes if node.kind == "cast"]
    for numbers in (*casts, *reversed(casts)):
        known = next((places[number] for number in numbers if number in places), None)
        if known is not None:
            places |= dict.fromkeys(numbers, known)
    for number in (number for numbers in casts for number in numbers):
        places.setdefault(number, "full")
    return places


def _components(subgraph: Subgraph) -> list[list[Node]]:
    """Return the nodes that share tensors with each other, in graph order."""
    components: list[tuple[set[int], list[Node]]] = []
    for node in subgraph.nodes:
        numbers, nodes = set(operand_numbers(node)), [node]
        for other in [c for c in components if c[0] & numbers]:
            components.remove(other)
            numbers |= other[0]
            nodes = other[1] + nodes
        components.append((numbers, nodes))
    return [nodes for _, nodes in components]


def _table(subgraph: Subgraph, nodes: list[Node], forms: Mapping[int, Form]) -> RowTable | str:
    letters = global_letters(subgraph)
    places = places_of(nodes)
    if any(node.kind == "cast" and places[node.inputs[0]] == "row" for node in nodes):
        return "it casts nothing of which there is one for each row"
    extents = {
        letter: extent
        for number in places
        for letter, extent in zip(letters[number], subgraph.tensors[number].extents, strict=True)
    }
    whole = letters[next(number for number, place in places.items() if place == "full")]
    narrow = {frozenset(letters[number]) for number, place in places.items() if place == "column"}
    narrow |= {  # a norm runs along a row, whether it has a scale or not
        frozenset(whole) - frozenset(letters[number]) for number, place in places.items() if place == "row"
    }
    if len(narrow) > 1:
        return "its biases, scales and norms do not run along the same axes"
    inside = [number for number in places if number in forms]
    strange = next((number for number in inside if not _is_readable(forms[number])), None)
    if strange is not None:
        return f"it reads and writes dense tensors, bytes and bits; tensor {strange} is {forms[strange]}"
    columns = "".join(sorted(next(iter(narrow)))) if narrow else whole
    rows = "".join(letter for letter in whole if letter not in columns)
    steps = {number: _steps(subgraph, number, letters[number], forms[number]) for number in inside}
    down = merge(rows, (steps[n] for n in inside if places[n] != "column"), extents)
    across = merge(columns, (steps[n] for n in inside if places[n] != "row"), extents)
    if down is None or across is None:
        return f"the {'row' if down is None else 'column'} axes do not act as one axis in every operand"
    if any(step != 1 for step in across.strides):
        return "its columns are not contiguous"
    pitches = dict(zip((n for n in inside if places[n] != "column"), down.strides, strict=True))
    if down.extent > 1 and any(pitches[n] != 1 for n in inside if places[n] == "row"):
        return "what it has one of for each row is not contiguous"
    count, width = down.extent, across.extent
    if count == 1:
        pitches = dict.fromkeys(pitches, width)
    if any(forms[n].format.has_bits and count > 1 and pitches[n] != width for n in inside if places[n] == "full"):
        return "an operand of bits lies in another order"
    if any(forms[n].format.has_bits and n in subgraph.outputs for n in inside) and width % BITS:
        return f"it writes bits of rows of whole bytes; these have {width} columns"
    if count == 1 and not narrow:
        width = gcd(across.extent, FLAT_COLUMNS) if across.extent % FLAT_COLUMNS else FLAT_COLUMNS
        count = across.extent // width
        pitches = dict.fromkeys(inside, width)
    operands = {
        n: RowOperand(places[n], forms[n].format, pitches.get(n, 0) if places[n] == "full" else 0,
                   _offset(subgraph, n, forms[n]))
        for n in inside
    }  # fmt: skip
    return RowTable(count, width, operands, any(node.kind in NORMS for node in nodes))


def _is_readable(form: Form) -> bool:
    return form.format.has_bits or not (form.is_flat or form.is_absent)


def _steps(subgraph: Subgraph, number: int, letters: str, form: Form) -> dict[str, int]:
    """Return the distance in elements along each letter, of an operand of bits as if it had one element each."""
    tensor = subgraph.tensors[number]
    if form.is_flat:
        strides = form.layout.strides(dict(zip(tensor.axes, tensor.extents, strict=True)))
        return {letter: strides[axis] for letter, axis in zip(letters, tensor.axes, strict=True)}
    placed, _, _ = form.placed(tensor.axes, tensor.extents)
    return dict(zip(letters, placed, strict=True))


def _offset(subgraph: Subgraph, number: int, form: Form) -> int:
    tensor = subgraph.tensors[number]
    return 0 if form.is_flat else form.placed(tensor.axes, tensor.extents)[1]


def not_rows(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why a fused set is not computed with these launch parameters, or None if it is."""
    table = as_rows(subgraph, candidate)
    if isinstance(table, str):
        return table
    dtypes = {subgraph.tensors[number].dtype for number in table.operands}
    if not dtypes <= set(DTYPES):
        return f"it computes in {', '.join(DTYPES)}; an operand is {min(dtypes - set(DTYPES))}"
    launch = RowLaunch.of(candidate.params)
    if launch.threads % WARP or launch.threads & (launch.threads - 1):
        return (
            f"a row is shared by {WARP}, {2 * WARP}, ... {MOST_THREADS} threads, a power of two; not {launch.threads}"
        )
    if launch.vector not in VECTORS or min(launch.rows, launch.blocks, launch.unroll) < 1:
        given = f"{launch.vector}, {launch.rows}, {launch.blocks} and {launch.unroll}"
        return f"vector is one of {', '.join(map(str, VECTORS))}; rows, blocks and unroll are 1 or more; given: {given}"
    if any(float(dict(node.attributes).get("p", 0.0)) >= 1 for node in subgraph.nodes):
        return "it scales what is kept by 1 / (1 - p), and p is 1"
    threads = launch.threads * launch.rows
    if not FEWEST_THREADS <= threads <= MOST_THREADS:
        return f"a block has {FEWEST_THREADS} to {MOST_THREADS} threads; {launch.threads} x {launch.rows} are {threads}"
    if launch.threads > WARP and launch.rows > MOST_BARRIERS:
        return f"a block has at most {MOST_BARRIERS} rows of more than a warp"
    steps = [table.columns, *(step for o in table.operands.values() for step in (o.pitch, o.offset))]
    if any(step % launch.vector for step in steps):
        return f"rows of {table.columns} elements do not begin at multiples of {launch.vector} in every operand"
    if launch.chunks(table) * launch.vector * launch.unroll > MOST_ELEMENTS:
        return f"a thread holds at most {MOST_ELEMENTS} elements; rows have {table.columns}"
    if launch.threads > WARP and launch.threads * launch.vector >= 2 * table.columns:
        return f"half of {launch.threads} threads would have nothing of a row of {table.columns} elements"
    held = launch.chunks(table) * launch.vector * threads * SUM_BYTES
    if SUMS & set(subgraph.kinds) and launch.rows > 1 and held > SHARED_BYTES:
        return f"a block's sums take {held} bytes of shared memory, where {SHARED_BYTES} are to be had"
    if launch.rows > 1 and launch.rows > table.rows:
        return f"there are {table.rows} rows"
    return None


def rows_layouts(subgraph: Subgraph) -> Iterator[tuple[str, ...]]:
    """Enumerate memory orders of the widest operand, masks as bits, other tensors raw and as any bits that they may be;
    parameters stay as declared."""
    letters = global_letters(subgraph)
    masks = dict.fromkeys(dropout_masks(subgraph), MASKS)
    others = [
        {number: storage for number in subgraph.boundary if may_be_stored(subgraph, number, storage)}
        for storage in PACKED
        if storage != MASKS
    ]
    fixed = kept_as_declared(subgraph)
    lead = max(letters.values(), key=len)
    for order in memory_orders(lead):
        layouts = {}
        for number in subgraph.boundary:
            own, axes = letters[number], subgraph.tensors[number].axes
            kept = own if number in fixed or not set(own) <= set(lead) else "".join(x for x in order if x in own)
            layouts[number] = kept.translate(str.maketrans(own, axes))
        for chosen in ({}, *(each for each in others if each)):
            stored = masks | chosen
            yield tuple(stored_as(layouts[number], stored.get(number, RAW)) for number in subgraph.boundary)


SETS = Connected(
    FUSED,
    alone=FUSED - {"add", "bias", "scale", "multiply", "cast"},
    without=(
        frozenset(),
        frozenset({"bias"}),  # which a product's own kernel can add
        frozenset({"bias_grad"}),  # which a product's own kernel can make
        frozenset({"bias", "bias_grad"}),
        SUMS,
    ),
)
_BUILDER = "autotuner.kernels.cupy.rows:rows"
KERNELS.add(
    Kernel("cupy_rows", (), _BUILDER, not_rows, layouts=rows_layouts, compiles=True, flat=PACKED, patterns=(SETS,),
           version=2),  # until 2, rows of a block could spoil each other's sums where a norm stood beside its gradient
    Kernel("cupy_stacked_bias_grad", (), _BUILDER, not_rows, layouts=stacked_vector_layouts, compiles=True,
           anchors=True, merges=False, patterns=(Siblings(("bias_grad",)), Siblings(("bias_grad", "cast")))),
)  # fmt: skip
