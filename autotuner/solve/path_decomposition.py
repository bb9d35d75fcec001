"""Path decomposition: a long problem as a row of blocks that share few states with their neighbours.

Variables are put in breadth-first order from a far end, so forward and backward of a layer, which saved tensors tie
together, come side by side. Between two windows of that order, the narrowest vertex cut is a minimum cut, by flow.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf, log2

from autotuner.checkpoint import checkpoint
from autotuner.solve.tables import CostTable

# Two encoder layers have about so many variables; up to these, one elimination of everything is quicker.
LONG = 400
# A variable with more neighbours is one that many layers share, such as a mask: it says nothing of what is near.
MOST_NEIGHBOURS = 32
# Between two cuts that are looked for, so many variables; one layer has about 125.
STRIDE = 24
WINDOW = 120
# Separators of more joint states, as a power of two, are no narrow places.
MOST_BITS = 13.0
# Blocks of fewer variables take longer in sum than larger ones.
FEWEST = 40
# What flows is no more exact than this.
ROUNDING = 1e-9

_Node = tuple[int, bool]
"""A variable where a flow enters it, or (True) leaves it."""


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

    Source:
        Ford and Fulkerson, Maximal flow through a network (1956): paths lead into a variable and out of it again.
    """

    def __init__(self, order: Sequence[int], near: Mapping[int, Collection[int]], state_counts: Sequence[int]) -> None:
        self.order, self.near = order, near
        self.rank = {v: place for place, v in enumerate(order)}
        # Of equal cuts, the one of fewer variables.
        self.bits = {v: log2(max(1, state_counts[v])) for v in order}
        self._last = {v: max((self.rank[u] for u in near[v]), default=0) for v in order}
        self._open: dict[int, None] = {}
        self._low = 0

    def behind(self, low: int, high: int) -> dict[int, None]:
        """Return the variables before the narrowest cut of `order[:low]` from `order[high:]`, the cut's own included.

        The cut may contain variables of both sides. Those far behind, which no later variable is beside, are left out
        where an earlier call had them; `low` rises from call to call.
        """
        before = self.order[self._low : low]
        self._low = low
        self._open = {v: None for v in (*self._open, *before) if self._last[v] >= low}
        flow = _Flow({}, {})
        while True:
            came, end = self._search(low, high, flow)
            if end is None:
                return dict.fromkeys((*before, *(v for v, is_out in came if not is_out)))
            path = [end]
            while (previous := came[path[-1]]) is not None:
                path.append(previous)
            flow.augment(path[::-1], self.bits)

    def _search(self, low: int, high: int, flow: "_Flow") -> tuple[dict[_Node, _Node | None], _Node | None]:
        """Return where each node was reached from that more can flow to, and the end of a path to the other side."""
        came: dict[_Node, _Node | None] = {(v, False): None for v in self._open}
        queue = list(came)
        for node in queue:
            v, is_out = node
            if is_out and self.rank[v] >= high:
                return came, node
            following: list[_Node] = []
            if is_out:
                following += [(u, False) for u in self.near[v] if self.rank[u] >= low]
                if flow.through.get(v, 0.0) > ROUNDING:
                    following.append((v, False))
            else:
                following += [(u, True) for u in self.near[v] if flow.along.get((u, v), 0.0) > ROUNDING]
                if flow.left(v, self.bits) > ROUNDING:
                    following.append((v, True))
            for other in following:
                if other not in came:
                    came[other] = node
                    queue.append(other)
        return came, None


@dataclass
class _Flow:
    """Flow through each variable, and from one to another."""

    through: dict[int, float]
    along: dict[tuple[int, int], float]

    def left(self, v: int, bits: Mapping[int, float]) -> float:
        return bits[v] - self.through.get(v, 0.0)

    def augment(self, path: Sequence[_Node], bits: Mapping[int, float]) -> None:
        """Let as much flow along a path as it has room for; against what flows already, that flows less."""
        steps = list(pairwise(path))
        room = inf
        for (v, is_out), (u, _) in steps:
            if v == u:
                room = min(room, self.through[v] if is_out else self.left(v, bits))
            elif not is_out:
                room = min(room, self.along[u, v])
        for (v, is_out), (u, _) in steps:
            if v == u:
                self.through[v] = self.through.get(v, 0.0) + (-room if is_out else room)
            elif is_out:
                self.along[v, u] = self.along.get((v, u), 0.0) + room
            else:
                self.along[u, v] -= room
