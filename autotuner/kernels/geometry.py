"""Memory order of operands, seen through an operator's spec: strides by letter, and groups that act as one axis."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations, product

from autotuner.ir.form import Form
from autotuner.ir.formats import FORMATS
from autotuner.ir.kinds import KINDS
from autotuner.ir.records import Candidate, Node, Subgraph

Strides = Mapping[str, int]

HALVES = ("bfloat16", "float16")
"""Element types of 16 bits, for which libraries take other ways than for float32."""


def operand_letters(node: Node) -> tuple[str, ...]:
    """Return the letters that a spec binds to each operand: inputs, then outputs."""
    left, right = node.spec.split("->")
    inputs = tuple(left.split(",")) if node.inputs else ()
    return inputs + (tuple(right.split(",")) if node.outputs else ())


def band_of(node: Node) -> tuple[int, int] | None:
    """Return how many keys before its own, and behind it, a query sees at most; None of another operator than that."""
    if node.kind != "window_mask":
        return None
    attributes = dict(node.attributes)
    return int(attributes["before"]), int(attributes["after"])


def letter_sides(node: Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the letters that a spec binds to the inputs, and those that it binds to the outputs."""
    letters = operand_letters(node)
    return letters[: len(node.inputs)], letters[len(node.inputs) :]


def has_program(node: Node) -> bool:
    """Tell whether an operator reads and makes tensors in declared order only, whatever their axes."""
    return node.kind in KINDS and "D" in KINDS[node.kind].pattern


def has_programs(subgraph: Subgraph) -> bool:
    return any(has_program(node) for node in subgraph.nodes)


def operand_numbers(node: Node) -> tuple[int, ...]:
    return node.inputs + node.outputs


def letter_extents(subgraph: Subgraph, node: Node) -> dict[str, int]:
    """Return elements along each letter of a node's spec."""
    return {
        letter: extent
        for number, letters in zip(operand_numbers(node), operand_letters(node), strict=True)
        for letter, extent in zip(letters, subgraph.tensors[number].extents, strict=True)
    }


def forms_by_number(subgraph: Subgraph, candidate: Candidate) -> dict[int, Form]:
    return dict(zip(subgraph.boundary, candidate.parsed_forms(), strict=True))


def may_be_stored(subgraph: Subgraph, number: int, storage: str) -> bool:
    """Tell whether a boundary tensor may have a storage format, by all operators of a subgraph that touch it there.

    A conversion does not say what it converts: that is known of the tensor of a graph.
    """
    side = "outputs" if number in subgraph.outputs else "inputs"
    return all(
        FORMATS[storage].admits(node.kind, place)
        for node in subgraph.nodes
        if number in getattr(node, side) and node.kind in KINDS
        for place, operand in enumerate(operand_numbers(node))
        if operand == number
    )


def operand_strides(subgraph: Subgraph, node: Node, forms: Mapping[int, Form]) -> list[Strides]:
    """Return, for each operand of a node, the distance in elements along each letter."""
    found: list[Strides] = []
    for number, letters in zip(operand_numbers(node), operand_letters(node), strict=True):
        tensor = subgraph.tensors[number]
        strides, _, _ = forms[number].placed(tensor.axes, tensor.extents)
        found.append(dict(zip(letters, strides, strict=True)))
    return found


@dataclass(frozen=True)
class Group:
    """Letters that act as one axis of a matrix: their memory order, elements in all, and stride of the fastest."""

    order: str
    extent: int
    strides: tuple[int, ...]


def merge(letters: Iterable[str], operands: Iterable[Strides], extents: Mapping[str, int]) -> Group | None:
    """Merge letters into one axis with the same order in every operand, or return None where that cannot be done.

    Letters of extent 1 merge with anything. An operand's stride of the merged axis is that of its fastest letter.
    """
    wide = [letter for letter in letters if extents[letter] > 1]
    order: list[str] | None = None
    steps: list[int] = []
    for strides in operands:
        mine = sorted(wide, key=lambda letter: -strides[letter])
        if order is not None and mine != order:
            return None
        order = mine
        for slow, fast in pairwise(mine):
            if strides[slow] != strides[fast] * extents[fast]:
                return None
        steps.append(strides[mine[-1]] if mine else 1)
    total = 1
    for letter in wide:
        total *= extents[letter]
    return Group("".join(order or ()), total, tuple(steps))


@dataclass(frozen=True)
class Matrices:
    """A contraction seen as one (strided, batched) matrix product: c[g, m, n] = sum over k of a[g, m, k] * b[g, k, n].

    Each operand's strides are (batch, rows, columns) in elements.
    """

    batch: int
    m: int
    n: int
    k: int
    a: tuple[int, int, int]
    b: tuple[int, int, int]
    c: tuple[int, int, int]


def letter_groups(node: Node) -> tuple[str, str, str, str]:
    """Return the letters of a contraction by role: batch (in all), m (a and c), n (b and c), k (a and b)."""
    a, b, c = operand_letters(node)
    return (
        "".join(x for x in a if x in b and x in c),
        "".join(x for x in a if x not in b),
        "".join(x for x in b if x not in a),
        "".join(x for x in a if x in b and x not in c),
    )


def as_matrices(node: Node, strides: Sequence[Strides], extents: Mapping[str, int]) -> Matrices | str:
    """See a contraction as matrices, or say in a sentence why one call cannot compute it."""
    a, b, c = strides
    letters = letter_groups(node)
    groups = [
        merge(letters[0], (a, b, c), extents),
        merge(letters[1], (a, c), extents),
        merge(letters[2], (b, c), extents),
        merge(letters[3], (a, b), extents),
    ]
    for group, names, role in zip(groups, letters, ("batch", "row", "column", "summed"), strict=True):
        if group is None:
            return f"the {role} axes {names!r} do not act as one axis in every operand"
    batch, m, n, k = (group for group in groups if group is not None)
    return Matrices(
        batch.extent, m.extent, n.extent, k.extent,
        (batch.strides[0], m.strides[0], k.strides[0]),
        (batch.strides[1], k.strides[1], n.strides[0]),
        (batch.strides[2], m.strides[1], n.strides[1]),
    )  # fmt: skip


def unit_stride(matrix: tuple[int, int, int], rows: int, columns: int) -> bool:
    """Tell whether a library's matrix product takes this operand as it lies: one of its two axes is contiguous."""
    return 1 in ((matrix[1] if rows > 1 else 1), (matrix[2] if columns > 1 else 1))


def unit_strides(matrices: Matrices) -> bool:
    """Tell whether a library's matrix product takes all three matrices as they lie."""
    return (
        unit_stride(matrices.a, matrices.m, matrices.k)
        and unit_stride(matrices.b, matrices.k, matrices.n)
        and unit_stride(matrices.c, matrices.m, matrices.n)
    )


def packed(matrix: tuple[int, int, int], rows: int, columns: int) -> bool:
    """Tell whether the matrices of a batch are dense and lie one behind the other."""
    return matrix[0] == rows * columns and matrix[1:] in ((columns, 1), (1, rows))


ROLE_ORDERS_MAX = 3
"""Axes of one role in a product that are tried in every order. More come from positions that windows split."""
ORDERS_MAX = 5
"""Axes of a tensor that element-wise kernels try in every order: 120 of them."""


def orders(letters: str) -> list[str]:
    """Return the orders in which axes of one role in a product are tried: all, or the declared one of many."""
    return ["".join(order) for order in permutations(letters)] if len(letters) <= ROLE_ORDERS_MAX else [letters]


def memory_orders(letters: str) -> list[str]:
    """Return the orders of memory in which element-wise kernels try a tensor, the declared one first.

    Of more axes than `ORDERS_MAX`, one is moved to the front or to the end: products want no other order of those.
    """
    if len(letters) <= ORDERS_MAX:
        return ["".join(order) for order in permutations(letters)]
    moved = ((letter, letters.replace(letter, "")) for letter in letters)
    return list(dict.fromkeys([letters, *(order for one, rest in moved for order in (one + rest, rest + one))]))


def contraction_layouts(node: Node) -> Iterator[tuple[str, str, str]]:
    """Enumerate assignments of layouts that map to one strided, batched matrix product.

    The letters of one role keep one order in all operands, each of `orders`. Without a batch an operand is stored rows
    first or columns first; with one, the batch stands outermost or between rows and columns.
    """
    batch, m, n, k = letter_groups(node)
    seen: set[tuple[str, str, str]] = set()
    for g_, m_, n_, k_ in product(orders(batch), orders(m), orders(n), orders(k)):
        for row in product(arrangements(g_, m_, k_), arrangements(g_, k_, n_), arrangements(g_, m_, n_)):
            if row not in seen:
                seen.add(row)
                yield row


def arrangements(batch: str, rows: str, columns: str) -> list[str]:
    if not batch:
        return [rows + columns, columns + rows]
    return [batch + rows + columns, batch + columns + rows, rows + batch + columns, columns + batch + rows]


def translate(layout: str, spec_letters: str, axes: str) -> str:
    """Write a layout in spec letters with a tensor's own axes."""
    return layout.translate(str.maketrans(spec_letters, axes))
