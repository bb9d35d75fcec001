"""How long problems are solved: narrow ones by elimination, HiGHS within bounds, and the same way whatever the gap."""

import random
from collections.abc import Callable
from importlib import import_module
from time import monotonic, process_time

import pytest

from autotuner.solve import exact
from autotuner.solve.arc_consistency import Consistent
from autotuner.solve.integer_program import IntegerProgram
from autotuner.solve.limits import SolverLimits
from autotuner.solve.problem import Factor, Problem, Row, Solution
from autotuner.solve.tables import Network
from scripts.bench.solvers.long_problems import joined_rows, solve_long
from scripts.bench.synthetic import synthetic_problem

LONG = import_module("scripts.bench.solvers.long_problems")


def joined(edges: list[tuple[int, int]], seed: int = 0) -> Problem:
    """Return variables of 2 to 5 states each, and a random cost for each pair of states of two that an edge joins."""
    draw = random.Random(seed)
    states = [draw.randint(2, 5) for _ in range(1 + max(max(edge) for edge in edges))]
    factors = []
    for one, other in edges:
        table: dict[Row, float] = {
            (f"s{i}", f"s{j}"): float(draw.randint(0, 99)) for i in range(states[one]) for j in range(states[other])
        }
        factors.append(Factor(f"f{one:03} {other:03}", (f"v{one:03}", f"v{other:03}"), table))
    return Problem(tuple(factors))


def chain(reach: int, length: int = 499) -> list[tuple[int, int]]:
    """Return the edges of a chain in which each variable is joined with so many before it."""
    return [(before, v) for v in range(length) for before in range(max(0, v - reach), v)]


def tree(size: int) -> list[tuple[int, int]]:
    draw = random.Random(1)
    return [(draw.randrange(max(0, v - 9), v), v) for v in range(1, size)]


@pytest.mark.slow
@pytest.mark.parametrize("edges", [chain(1), chain(3), tree(600)], ids=["chain", "chain of width 3", "tree"])
def test_a_long_narrow_problem_is_eliminated_in_seconds_and_never_given_to_highs(
    edges: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = joined(edges)
    assert len(problem.variables) > LONG.LONG
    asked: list[str] = []
    for name in ("scipy.optimize.milp", "scipy.optimize.linprog"):
        monkeypatch.setattr(name, lambda *_, name=name, **__: asked.append(name))
    begun = process_time()
    found = solve_long(problem)
    assert process_time() - begun < 10  # HiGHS takes half a minute for the second one
    assert not asked
    assert found.total_us == found.lower_bound_us == problem.cost_us(found.states)
    assert exact(problem).total_us == found.total_us


def test_joined_rows_are_counted_until_there_are_too_many() -> None:
    # x goes first, with 2 * 3 rows, then y with 3 * 4, then z with 4.
    scopes, alive = [("x", "y"), ("y", "z")], {"x": 2, "y": 3, "z": 4}
    number = {name: place for place, name in enumerate(alive)}
    tables = [tuple(number[name] for name in scope) for scope in scopes]
    counts = {number[name]: count for name, count in alive.items()}
    assert joined_rows(tables, counts, 100) == pytest.approx(6 + 12 + 4)
    assert joined_rows(tables, counts, 7) == pytest.approx(6 + 12)
    assert joined_rows([], {}, 7) == 0


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the seconds that HiGHS is given for integer programs, as it is called."""
    given: list[float] = []
    whole = LONG.solved

    def counted(program: IntegerProgram, time_limit_s: float, *arguments: object) -> object:
        given.append(time_limit_s)
        return whole(program, time_limit_s, *arguments)

    monkeypatch.setattr(LONG, "solved", counted)
    return given


@pytest.mark.slow
def test_without_a_time_limit_highs_and_messages_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = synthetic_problem(150, 4, seed=3)
    best = exact(problem).total_us
    given = recorded(monkeypatch)
    monkeypatch.setattr(LONG, "LONG", 50)
    assert solve_long(problem).total_us == best
    assert given[0] == pytest.approx(LONG.TURN_S, abs=0.1)
    given.clear()
    monkeypatch.setattr(LONG, "TURN_S", 0.02)
    found = solve_long(problem)
    assert found.total_us == found.lower_bound_us == best
    assert len(given) > 1
    assert all(seconds <= 0.02 * 2**turn for turn, seconds in enumerate(given))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gap", [0.001, 0.02])
def test_a_gap_of_nothing_gives_no_worse_plan_nor_bound_when_the_time_is_over(
    gap: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = synthetic_problem(150, 4, seed)
    best = exact(problem).total_us
    # The time is over when HiGHS's is, which finds nothing in that.
    along: Callable[..., object] = LONG._along_path

    def late(network: Network, left: Consistent, limits: SolverLimits, known: object) -> object:
        limits.ends_at = monotonic()
        return along(network, left, limits, known)

    def limited(allowed: float) -> Solution:
        found = solve_long(problem, gap=allowed, time_limit_s=60)
        assert found.lower_bound_us <= best <= found.total_us == problem.cost_us(found.states)
        return found

    monkeypatch.setattr(LONG, "LONG", 50)
    monkeypatch.setattr(LONG, "PROGRAM_TIME", 0.0)
    monkeypatch.setattr(LONG, "_along_path", late)
    least, near = limited(0.0), limited(gap)
    assert least.total_us <= near.total_us
    assert least.lower_bound_us >= near.lower_bound_us
    assert least.total_us <= least.lower_bound_us * 1.005


def test_what_no_better_plan_can_have_is_ruled_out_before_highs_solves_a_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = synthetic_problem(150, 4, seed=1)
    monkeypatch.setattr(LONG, "LONG", 50)
    ruled_out: list[float] = []
    whole = LONG.solved

    def counted(program: IntegerProgram, time_limit_s: float, gap: float, excluded: object) -> object:
        assert excluded is not None
        ruled_out.append(float(sum(excluded)) / len(program.costs))  # type: ignore[call-overload]
        return whole(program, time_limit_s, gap, excluded)

    monkeypatch.setattr(LONG, "solved", counted)
    found = solve_long(problem)
    assert ruled_out
    assert min(ruled_out) > 0.5
    assert exact(problem).total_us == pytest.approx(found.total_us, rel=1e-12)
