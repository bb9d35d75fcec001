"""Of plans that are as fast within a share, the one that leaves the fewest bytes for backward."""

import pytest

from autotuner.plan.configuration import OF_FASTEST
from autotuner.solve import exact
from autotuner.solve.problem import Factor, Problem
from autotuner.tuner.solving import LEAN_BYTES, leaner

MIB = 1 << 20
"""Two tensors of 64 MiB: without one, a plan takes 0.6 us more than 100, without the other 3 us."""
PROBLEM = Problem(
    (
        Factor("all else", ("step",), {("only",): 100.0}),
        Factor("cheap", ("cheap",), {("held",): 0.0, ("again",): 0.6}, {("held",): 64 * MIB}),
        Factor("dear", ("dear",), {("held",): 0.0, ("again",): 3.0}, {("held",): 64 * MIB}),
    )
)


def test_bytes_are_saved_where_that_takes_less_than_the_share() -> None:
    fastest = exact(PROBLEM)
    found = leaner(PROBLEM, fastest)
    assert found.states == {"step": "only", "cheap": "again", "dear": "held"}
    assert (found.total_us, found.held_bytes, found.lower_bound_us) == (100.6, 64 * MIB, 100.0)
    assert [found.statistics[name] for name in OF_FASTEST] == [100.0, 128 * MIB, 64 * MIB]


def test_what_no_price_of_a_byte_shows_is_found_by_a_budget() -> None:
    tensors = {"small": (10, 0.9), "large": (64, 3.0)}  # all at once are cheaper a byte than the small one alone
    problem = Problem(
        (
            Factor("all else", ("step",), {("only",): 100.0}),
            *(
                Factor(name, (name,), {("held",): 0.0, ("again",): us}, {("held",): size * MIB})
                for name, (size, us) in tensors.items()
            ),
        )
    )
    assert leaner(problem, exact(problem)).states == {"step": "only", "small": "again", "large": "held"}


def test_what_holds_little_or_saves_nothing_stays_the_fastest() -> None:
    small = Problem((Factor("x", ("x",), {("held",): 1.0, ("again",): 1.001}, {("held",): LEAN_BYTES - 1}),))
    fastest = exact(small)
    assert leaner(small, fastest) is fastest
    alike = Problem((Factor("x", ("x",), {("held",): 1.0, ("again",): 1.1}, {("held",): 4 * LEAN_BYTES}),))
    fastest = exact(alike)
    assert leaner(alike, fastest) is fastest


@pytest.mark.parametrize("share", [0.001, 0.009])
def test_a_saving_is_found_whatever_a_byte_costs(share: float) -> None:
    problem = Problem(
        (Factor("x", ("x",), {("held",): 1000.0, ("again",): 1000 * (1 + share)}, {("held",): 2 * LEAN_BYTES}),)
    )
    assert leaner(problem, exact(problem)).states == {"x": "again"}
