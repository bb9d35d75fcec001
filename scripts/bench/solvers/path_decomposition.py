"""Path decomposition: a long problem as a row of blocks that share few states with their neighbours.

Variables are put in breadth-first order from a far end, so forward and backward of a layer, which saved tensors tie
together, come side by side. Between two windows of that order, the narrowest vertex cut is a minimum cut, by flow.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import log2

import numpy as np

from autotuner.checkpoint import checkpoint
from autotuner.solve.tables import CostTable, Integers

# A variable with more neighbours is one that many layers share, such as a mask: it says nothing of what is near.
MOST_NEIGHBOURS = 32
# Between two cuts that are looked for, so many variables; one layer has about 125.
STRIDE = 24
WINDOW = 120
# Separators of more joint states, as a power of two, are no narrow places.
MOST_BITS = 13.0
# Blocks of fewer variables take longer in sum than larger ones.
FEWEST = 40
# A flow is a whole number of such parts of a bit; what no flow exceeds.
UNITS = 1 << 12
UNLIMITED = 1 << 30


@dataclass(frozen=True)
class PathBlock:
    """Neighbouring variables, and what they share with the blocks before and after.

    Args:
        variables: of its tables, those of `left` included.
        tables: places of the tables whose last variable is here.
        left: variables of earlier blocks that its tables or later ones name.
        right: variables of this block or of earlier ones that later tables name.
    """

    variables: tuple[int, ...]
    tables: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]


def path_decomposition(tables: Mapping[int, CostTable], state_counts: Sequence[int]) -> list[PathBlock]:
    """Return the blocks from one end to the other; a single one where there is no narrow place.

    Source:
        Robertson and Seymour, Graph minors I (1983), for path decompositions.
    """
    near = neighbours(tables)
    hubs = [v for v, others in near.items() if len(others) > MOST_NEIGHBOURS]
    order = breadth_first(near, hubs)
    sides = _chosen(_Cuts(order, near, state_counts), near)
    inside: set[int] = set()
    blocks, left = list[PathBlock](), tuple[int, ...]()
    for side in sides:
        inside.update(side)
        right = tuple(v for v in (*left, *side) if any(u not in inside for u in near[v]))
        blocks.append(PathBlock((*left, *side), (), left, right))
        left = right
    return having(blocks, tables)


def having(blocks: Sequence[PathBlock], tables: Mapping[int, CostTable]) -> list[PathBlock]:
    """Return the blocks with other tables of the same variables, of which the same are neighbours."""
    number: dict[int, int] = {}
    for block_number, block in enumerate(blocks):
        for v in block.variables:
            number.setdefault(v, block_number)
    places: list[list[int]] = [[] for _ in blocks]
    for place, table in tables.items():
        places[max((number[v] for v in table.variables), default=0)].append(place)
    return [replace(block, tables=tuple(own)) for block, own in zip(blocks, places, strict=True)]


def _chosen(cuts: "_Cuts", near: Mapping[int, Collection[int]]) -> list[list[int]]:
    """Return the variables of each block, without those of earlier ones."""
    found: list[tuple[float, dict[int, None]]] = []  # cuts that are met: how wide, and what is new behind each
    inside: set[int] = set()
    width, right = 0.0, list[int]()
    for low in range(STRIDE, len(cuts.order) - WINDOW, STRIDE):
        checkpoint()
        added = {v: None for v in cuts.behind(low, low + WINDOW) if v not in inside}
        inside.update(added)
        right = [v for v in (*right, *added) if any(u not in inside for u in near[v])]
        found.append((sum(cuts.bits[v] for v in right), added))
    sizes = list(accumulate(len(added) for _, added in found))
    sides: list[list[int]] = []
    pending: list[int] = []
    for place, (width, added) in enumerate(found):
        pending += added
        near_by = [other for (other, _), size in zip(found, sizes, strict=True) if abs(size - sizes[place]) < WINDOW]
        if len(pending) >= FEWEST and width <= min(MOST_BITS, min(near_by) + 1):
            sides.append(sorted(pending, key=cuts.rank.__getitem__))
            pending = []
    return [*sides, [v for v in cuts.order if v in pending or v not in inside]]


def neighbours(tables: Mapping[int, CostTable]) -> dict[int, dict[int, None]]:
    """Return the variables that share a table with each variable, in order of the tables."""
    near: dict[int, dict[int, None]] = {}
    for table in tables.values():
        for v in table.variables:
            near.setdefault(v, {}).update(dict.fromkeys(table.variables))
    for v, others in near.items():
        del others[v]
    return near


def breadth_first(near: Mapping[int, Collection[int]], first: Sequence[int]) -> list[int]:
    """Return all variables: `first`, then the others breadth first from one that is far from all, without those."""
    start = list(near)
    for _ in range(2):
        reached = dict.fromkeys(first)
        ordered = list(first)
        for root in start:
            queue = [] if root in reached else [root]
            reached.setdefault(root)
            for v in queue:
                new = [u for u in near[v] if u not in reached]
                reached.update(dict.fromkeys(new))
                queue += new
            ordered += queue
        start = ordered[: -len(ordered) - 1 : -1]
    return ordered


class _Cuts:
    """Narrowest vertex cuts between windows of an order: a variable is as wide as its states have bits.

    Each variable is an arc of a flow network, as long as the flow through it is cut there; arcs between them have no
    limit.

    Source:
        Ford and Fulkerson, Maximal flow through a network (1956); Dinic's algorithm is scipy's.
    """

    def __init__(self, order: Sequence[int], near: Mapping[int, Collection[int]], state_counts: Sequence[int]) -> None:
        self.order = order
        self.rank = {v: place for place, v in enumerate(order)}
        # Of equal cuts, the one of fewer variables.
        self.bits = {v: log2(max(1, state_counts[v])) for v in order}
        self._capacities = np.array([round(UNITS * self.bits[v]) for v in order], np.int32)
        # By rank from here on.
        ends = np.cumsum([0, *(len(near[v]) for v in order)])
        self._starts, self._counts = ends[:-1], np.diff(ends)
        self._beside = np.array([self.rank[u] for v in order for u in near[v]], np.int64)
        self._last = np.array([max((self.rank[u] for u in near[v]), default=0) for v in order], np.int64)
        self._open = np.zeros(0, np.int64)
        self._low = 0

    def behind(self, low: int, high: int) -> dict[int, None]:
        """Return the variables before the narrowest cut of `order[:low]` from `order[high:]`, the cut's own included.

        The cut may contain variables of both sides. Those far behind, which no later variable is beside, are left out
        where an earlier call had them; `low` rises from call to call.
        """
        before = np.arange(self._low, low)
        self._low = low
        self._open = np.concatenate((self._open, before))
        self._open = self._open[self._last[self._open] >= low]
        inner = np.concatenate((self._open, np.arange(low, high)))
        counts = self._counts[inner]
        at = np.repeat(self._starts[inner] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        onward = self._beside[at] >= low
        one, other = np.repeat(inner, counts)[onward], self._beside[at][onward]
        reached = self._reached(np.unique(np.concatenate((inner, other))), one, other, high)
        return dict.fromkeys(self.order[rank] for rank in (*before, *reached))

    def _reached(self, nodes: Integers, one: Integers, other: Integers, high: int) -> Integers:
        """Return those nodes that more could flow to at a maximal flow from the open ones to those from `high` on.

        Args:
            one, other: the ends of each arc; all numbers are ranks.
        """
        from scipy.sparse import csr_array  # type: ignore[import-untyped]
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow  # type: ignore[import-untyped]

        # A variable is entered at its place among the nodes, and left at that and their count.
        size = len(nodes)
        source, sink = 2 * size, 2 * size + 1
        every, opened, far = np.arange(size), np.searchsorted(nodes, self._open), np.flatnonzero(nodes >= high)
        rows = (every, size + np.searchsorted(nodes, one), np.full(len(opened), source), size + far)
        columns = (size + every, np.searchsorted(nodes, other), opened, np.full(len(far), sink))
        unlimited = np.full(len(one) + len(opened) + len(far), UNLIMITED, np.int32)
        capacities = np.concatenate((self._capacities[nodes], unlimited))
        ends = np.concatenate(rows), np.concatenate(columns)
        network = csr_array((capacities, ends), shape=(sink + 1, sink + 1))
        rest = network - maximum_flow(network, source, sink).flow
        rest.eliminate_zeros()
        reached = breadth_first_order(rest, source, return_predecessors=False)
        found: Integers = nodes[np.sort(reached[reached < size])]
        return found
