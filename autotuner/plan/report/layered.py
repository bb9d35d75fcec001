"""Places for the nodes of an acyclic graph, layer by layer: few crossings, straight edges, no overlap.

Source: Sugiyama, Tagawa, Toda, Methods for visual understanding of hierarchical system structures (1981); places within
a layer by isotonic regression (pool adjacent violators).
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

SWEEPS = 24
"""Passes over all layers, down and up, for the order and again for the places; more change nothing visible."""

BEND_WIDTH = 14.0
BEND_PULL = 8.0
"""The weight of lying straight above each other, of two bends of one edge against two nodes."""


@dataclass(frozen=True, slots=True)
class NodeSize:
    width: float
    height: float


@dataclass(frozen=True)
class Placement:
    """Places of nodes, and the points through which each edge runs between them.

    Args:
        centres: horizontal centre of each node.
        tops: upper edge of each node.
        bends: per edge, (x, top, bottom) of each layer that it passes through between its ends.
        width, height: of the whole, from 0.
    """

    centres: Mapping[str, float]
    tops: Mapping[str, float]
    bends: Mapping[tuple[str, str], tuple[tuple[float, float, float], ...]]
    width: float
    height: float


def place(
    sizes: Mapping[str, NodeSize],
    edges: Sequence[tuple[str, str]],
    *,
    close: Collection[str] = (),
    gap_x: float = 18.0,
    gap_y: float = 26.0,
) -> Placement:
    """Place nodes so that every edge leads downwards.

    Args:
        sizes: of the nodes; where nothing else decides, they are placed in this order.
        edges: from, to; acyclic. Edges of one node that pass through a layer share one bend there.
        close: nodes that stay in the layer after the one node that leads to them; others lie as late as they can.
        gap_x, gap_y: between neighbours in a layer, and between layers.

    Cost:
        O(sweeps * (n + e) log n) for n nodes and bends and e edges between neighbouring layers.
    """
    if not sizes:
        return Placement({}, {}, {}, 0.0, 0.0)
    layer_of = _layer_of(tuple(sizes), edges)
    layer_of |= {target: layer_of[source] + 1 for source, target in edges if target in close}
    widths = {node: size.width for node, size in sizes.items()}
    short, paths = _through_layers(layer_of, edges)
    widths |= {node: BEND_WIDTH for node in layer_of if node not in widths}
    layers = _ordered(_layers(layer_of), short)
    centres = _centres(layers, short, widths, gap_x)
    _straighten(centres, layers, paths.values(), widths, gap_x)
    tops, height, bands = {}, 0.0, []
    for layer in layers:
        tall = max((sizes[node].height for node in layer if node in sizes), default=0.0)
        bands.append((height, height + tall))
        for node in layer:
            if node in sizes:
                tops[node] = height + (tall - sizes[node].height) / 2
        height += tall + gap_y
    left = min(centres[node] - widths[node] / 2 for node in centres)
    right = max(centres[node] + widths[node] / 2 for node in centres)
    bends = {
        edge: tuple((centres[bend] - left, *bands[layer_of[bend]]) for bend in path) for edge, path in paths.items()
    }
    return Placement(
        {node: centres[node] - left for node in sizes}, tops, bends, right - left, max(0.0, height - gap_y)
    )


def spread(wanted: Sequence[float], sizes: Sequence[float], gap: float, pull: Sequence[float] = ()) -> list[float]:
    """Return centres in the given order, `gap` apart at least, with the least sum of squared distances to the wanted.

    Args:
        wanted: centre that each would like to have.
        sizes: extent of each along the line.
        pull: weight of each wish; by default all alike.
    """
    offsets = [0.0]
    for before, after in pairwise(sizes):
        offsets.append(offsets[-1] + (before + after) / 2 + gap)
    blocks: list[list[float]] = []  # mean, weight, members
    for i, wish in enumerate(wanted):
        blocks.append([wish - offsets[i], pull[i] if pull else 1.0, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, weight, members = blocks.pop()
            last = blocks[-1]
            last[0] = (last[0] * last[1] + mean * weight) / (last[1] + weight)
            last[1] += weight
            last[2] += members
    means = [mean for mean, _, members in blocks for _ in range(int(members))]
    return [mean + offset for mean, offset in zip(means, offsets, strict=False)]


def _layer_of(nodes: Sequence[str], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Return each node's layer: after all that lead to it; then as near as possible to what it leads to."""
    followers: dict[str, list[str]] = defaultdict(list)
    waiting = dict.fromkeys(nodes, 0)
    for source, target in edges:
        followers[source].append(target)
        waiting[target] += 1
    order = [node for node in nodes if not waiting[node]]
    found = dict.fromkeys(nodes, 0)
    for node in order:  # grows as it is read
        for follower in followers[node]:
            found[follower] = max(found[follower], found[node] + 1)
            waiting[follower] -= 1
            if not waiting[follower]:
                order.append(follower)
    for node in reversed(order):
        if followers[node]:
            found[node] = min(found[follower] for follower in followers[node]) - 1
    return found


def _through_layers(
    layer_of: dict[str, int], edges: Iterable[tuple[str, str]]
) -> tuple[list[tuple[str, str, float]], dict[tuple[str, str], list[str]]]:
    """Cut edges into pieces between neighbouring layers, adding the bends between to `layer_of`.

    Returns:
        Pieces with their pull, each once; the bends of each edge.
    """
    pieces: dict[tuple[str, str], float] = {}
    paths: dict[tuple[str, str], list[str]] = {}
    for source, target in edges:
        path = []
        for layer in range(layer_of[source] + 1, layer_of[target]):
            bend = f"{source}\n{layer}"
            layer_of[bend] = layer
            path.append(bend)
        whole = [source, *path, target]
        for upper, lower in pairwise(whole):
            bent = (upper in path) + (lower in path)
            pieces[upper, lower] = (1.0, 2.0, BEND_PULL)[bent]
        paths[source, target] = path
    return [(*ends, pull) for ends, pull in pieces.items()], paths


def _layers(layer_of: Mapping[str, int]) -> list[list[str]]:
    layers: list[list[str]] = [[] for _ in range(max(layer_of.values()) + 1)]
    for node, layer in layer_of.items():
        layers[layer].append(node)
    return layers


def _ordered(layers: list[list[str]], pieces: Sequence[tuple[str, str, float]]) -> list[list[str]]:
    """Return the layers with their nodes in an order with few crossings: barycentres, the best of all sweeps kept."""
    above: dict[str, list[str]] = defaultdict(list)
    below: dict[str, list[str]] = defaultdict(list)
    for upper, lower, _ in pieces:
        below[upper].append(lower)
        above[lower].append(upper)
    best, fewest = [list(layer) for layer in layers], _crossings(layers, below)
    current = [list(layer) for layer in layers]
    for sweep in range(SWEEPS):
        downwards = sweep % 2 == 0
        neighbours = above if downwards else below
        rows = range(1, len(current)) if downwards else range(len(current) - 2, -1, -1)
        for row in rows:
            fixed = {node: i for i, node in enumerate(current[row - 1 if downwards else row + 1])}
            current[row] = _by_barycentre(current[row], neighbours, fixed)
        crossings = _crossings(current, below)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in current], crossings
    return best


def _by_barycentre(layer: list[str], neighbours: Mapping[str, list[str]], fixed: Mapping[str, int]) -> list[str]:
    """Sort a layer by the mean place of its neighbours; those without any keep their place."""
    means = {
        node: sum(fixed[other] for other in neighbours[node]) / len(neighbours[node])
        for node in layer
        if neighbours.get(node)
    }
    moving = iter(sorted(means, key=lambda node: means[node]))
    return [next(moving) if node in means else node for node in layer]


def _crossings(layers: Sequence[Sequence[str]], below: Mapping[str, list[str]]) -> int:
    """Return how many pairs of edges between neighbouring layers cross."""
    total = 0
    for upper, lower in pairwise(layers):
        places = {node: i for i, node in enumerate(lower)}
        seen: list[int] = []
        for node in upper:
            ends = sorted(places[other] for other in below.get(node, ()))
            total += sum(len(seen) - bisect_left(seen, end + 1) for end in ends)
            for end in ends:
                insort(seen, end)
    return total


def _centres(
    layers: Sequence[Sequence[str]], pieces: Sequence[tuple[str, str, float]], widths: Mapping[str, float], gap: float
) -> dict[str, float]:
    """Return horizontal centres: each node near the mean of its neighbours, layer by layer, down and up in turns."""
    above: dict[str, list[tuple[str, float]]] = defaultdict(list)
    below: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for upper, lower, pull in pieces:
        below[upper].append((lower, pull))
        above[lower].append((upper, pull))
    centres: dict[str, float] = {}
    for layer in layers:
        placed = spread([0.0] * len(layer), [widths[node] for node in layer], gap)
        centres.update(zip(layer, placed, strict=True))
    for sweep in range(SWEEPS):
        downwards = sweep % 2 == 0
        settling = sweep >= SWEEPS - 4
        for layer in layers if downwards else reversed(layers):
            wanted, pulls = [], []
            for node in layer:
                near = [*above[node], *below[node]] if settling else (above if downwards else below)[node]
                weight = sum(pull for _, pull in near)
                wanted.append(sum(centres[n] * pull for n, pull in near) / weight if weight else centres[node])
                pulls.append(weight or 0.1)
            placed = spread(wanted, [widths[node] for node in layer], gap, pulls)
            centres.update(zip(layer, placed, strict=True))
    return centres


def _straighten(
    centres: dict[str, float],
    layers: Sequence[Sequence[str]],
    paths: Iterable[Sequence[str]],
    widths: Mapping[str, float],
    gap: float,
) -> None:
    """Move the bends of each edge above each other where all of them find room between their neighbours."""
    between = {
        node: (left, right)
        for layer in layers
        for left, node, right in zip([None, *layer], layer, [*layer[1:], None], strict=False)
    }

    def room(bend: str) -> tuple[float, float]:
        left, right = between[bend]
        own = widths[bend] / 2 + gap
        low = centres[left] + widths[left] / 2 + own if left is not None else -float("inf")
        high = centres[right] - widths[right] / 2 - own if right is not None else float("inf")
        return low, high

    for path in sorted(paths, key=len, reverse=True):
        if len(path) > 1:
            rooms = [room(bend) for bend in path]
            low, high = max(low for low, _ in rooms), min(high for _, high in rooms)
            if low <= high:
                middle = sum(centres[bend] for bend in path) / len(path)
                centres.update(dict.fromkeys(path, min(max(middle, low), high)))
