"""Equal layers in a row, against the same problem written out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotuner.errors import InfeasibleError, ProblemError
from autotuner.solve import chained, exact, exact_repeated
from autotuner.solve.problem import Factor, Problem
from tests.solve.drawing import problems

AB, BA = "ab", "ba"
LAYER = Problem(
    (Factor("layer", ("x", "y"), {(AB, AB): 5.0, (AB, BA): 1.0, (BA, AB): 2.0, (BA, BA): 4.0}),),
)


def test_the_best_chain_is_not_made_of_the_best_layer() -> None:
    found = exact_repeated(LAYER, {"y": "x"}, 3)
    assert found.total_us == found.lower_bound_us == 4.0
    assert [found.states[f"{i}:x"] for i in range(3)] == [AB, BA, AB]
    assert [found.states[f"{i}:y"] for i in range(3)] == [BA, AB, BA]


def test_only_ends_that_look_cheap_are_solved_however_many_layers_there_are() -> None:
    layer = Problem((Factor("layer", ("x", "y"), {(AB, AB): 1.0, (AB, BA): 5.0, (BA, AB): 5.0, (BA, BA): 5.0}),))
    found = exact_repeated(layer, {"y": "x"}, 10_000)
    assert found.total_us == 10_000.0
    assert found.statistics["solved"] == 1


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(layer=problems(), data=st.data(), count=st.integers(1, 4))
def test_layers_in_a_row_cost_what_they_cost_written_out(layer: Problem, data: st.DataObject, count: int) -> None:
    names = layer.variables
    size = data.draw(st.integers(0, min(2, len(names))))
    ends, starts = (tuple(data.draw(st.permutations(names)))[:size] for _ in range(2))
    joints = dict(zip(ends, starts, strict=True))
    whole = chained(layer, joints, count)
    try:
        expected = exact(whole)
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            exact_repeated(layer, joints, count)
        return
    found = exact_repeated(layer, joints, count)
    assert found.total_us == found.lower_bound_us == expected.total_us
    assert whole.cost_us(found.states) == found.total_us


@pytest.mark.parametrize(
    "joints, count, reason",
    [({"y": "z"}, 2, "no variables 'z'"), ({"x": "y", "y": "y"}, 2, "lead to one"), ({"y": "x"}, 0, "0 layers")],
)
def test_a_chain_that_cannot_be_is_refused(joints: dict[str, str], count: int, reason: str) -> None:
    with pytest.raises(ProblemError, match=reason):
        exact_repeated(LAYER, joints, count)
