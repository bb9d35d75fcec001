"""Places of nodes: nothing overlaps, every edge leads down, long edges are straight."""

import random
from itertools import pairwise

import pytest

from autotuner.plan.report.layered import NodeSize, Placement, place, spread

Edges = list[tuple[str, str]]


def random_graph(seed: int) -> tuple[dict[str, NodeSize], Edges]:
    """Return a graph whose edges lead from lower numbers to higher ones."""
    drawn = random.Random(seed)
    sizes = {f"n{i}": NodeSize(drawn.uniform(10, 200), drawn.uniform(10, 90)) for i in range(drawn.randint(2, 40))}
    edges = {
        (f"n{i}", f"n{j}") for j in range(1, len(sizes)) for i in drawn.sample(range(j), min(j, drawn.randint(0, 3)))
    }
    return sizes, sorted(edges)


def overlap(placed: Placement, sizes: dict[str, NodeSize], one: str, other: str) -> bool:
    apart_x = abs(placed.centres[one] - placed.centres[other]) >= (sizes[one].width + sizes[other].width) / 2 - 1e-6
    upper, lower = sorted((one, other), key=lambda node: placed.tops[node])
    return not apart_x and placed.tops[upper] + sizes[upper].height > placed.tops[lower] + 1e-6


@pytest.mark.parametrize("seed", range(25))
def test_nodes_do_not_overlap_and_edges_lead_down(seed: int) -> None:
    sizes, edges = random_graph(seed)
    placed = place(sizes, edges)
    names = list(sizes)
    assert not [(a, b) for i, a in enumerate(names) for b in names[:i] if overlap(placed, sizes, a, b)]
    for source, target in edges:
        heights = [placed.tops[source] + sizes[source].height]
        for _, upper, lower in placed.bends[source, target]:
            heights += [upper, lower]
        heights.append(placed.tops[target])
        assert all(above <= below + 1e-6 for above, below in pairwise(heights))
    assert all(placed.centres[n] - s.width / 2 + 1e-6 >= 0 for n, s in sizes.items())
    assert all(placed.centres[n] + s.width / 2 <= placed.width + 1e-6 for n, s in sizes.items())
    assert all(placed.tops[n] >= 0 and placed.tops[n] + s.height <= placed.height + 1e-6 for n, s in sizes.items())


def test_equal_graphs_have_equal_places() -> None:
    assert place(*random_graph(3)) == place(*random_graph(3))


def test_an_edge_past_several_layers_is_straight_there() -> None:
    chain = [f"n{i}" for i in range(6)]
    sizes = dict.fromkeys(chain, NodeSize(100, 20))
    placed = place(sizes, [*pairwise(chain), ("n0", "n5")])
    bends = placed.bends["n0", "n5"]
    assert len(bends) == 4
    assert len({x for x, _, _ in bends}) == 1
    assert abs(bends[0][0] - placed.centres["n2"]) > 50, "the edge runs through a node"


def test_a_node_lies_just_before_its_reader_and_a_close_one_just_after_its_maker() -> None:
    sizes = dict.fromkeys(("a", "b", "c", "source", "label"), NodeSize(10, 10))
    edges = [("a", "b"), ("b", "c"), ("source", "c"), ("a", "label"), ("label", "c")]
    placed = place(sizes, edges)
    assert placed.tops["source"] == placed.tops["b"] == placed.tops["label"]
    longer = {**sizes, "d": NodeSize(10, 10)}
    more = [*edges[:-1], ("c", "d"), ("label", "d")]
    assert place(longer, more).tops["label"] == place(longer, more).tops["c"]
    assert place(longer, more, close={"label"}).tops["label"] == place(longer, more).tops["b"]


def test_nothing_has_no_extent() -> None:
    assert (place({}, []).width, place({}, []).height) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("wanted", "placed"),
    [
        ([0.0, 0.0], [-1.5, 1.5]),
        ([0.0, 10.0], [0.0, 10.0]),
        ([5.0, 0.0, 20.0], [1.0, 4.0, 20.0]),
        ([], []),
    ],
)
def test_neighbours_move_apart_as_little_as_they_can(wanted: list[float], placed: list[float]) -> None:
    assert spread(wanted, [2.0] * len(wanted), 1.0) == pytest.approx(placed)


def test_what_pulls_harder_moves_less() -> None:
    assert spread([0.0, 0.0], [2.0, 2.0], 1.0, [2.0, 1.0]) == pytest.approx([-1.0, 2.0])
