"""Long problems, block by block: the optimum of exhaustive search, bounds that are true at any time, equal blocks."""

import itertools
import random
from importlib import import_module

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotuner.errors import InfeasibleError
from autotuner.solve import exact
from autotuner.solve.problem import Factor, Problem, Row
from autotuner.solve.tables import encode
from scripts.bench.brute_force import brute_force
from scripts.bench.solvers.long_problems import solve_long
from scripts.bench.solvers.path_decomposition import path_decomposition
from scripts.bench.synthetic import synthetic_problem
from tests.solve.drawing import problems

LONG = import_module("scripts.bench.solvers.long_problems")
PATH = import_module("scripts.bench.solvers.path_decomposition")
MESSAGES = import_module("scripts.bench.solvers.message_passing")
BLOCKS = import_module("scripts.bench.solvers.blocks")
PROGRAM = import_module("autotuner.solve.integer_program")
LINEAR = import_module("scripts.bench.solvers.linear_program")


def small_blocks(patch: pytest.MonkeyPatch, window: int = 1, share: float = 0.0, rows: float = 0.5) -> None:
    """Cut problems of any length, send messages that say little, and split cases early."""
    patch.setattr(LONG, "LONG", 0)
    patch.setattr(LONG, "NARROW_ROWS", 0)
    patch.setattr(LONG, "SHARE", share)
    patch.setattr(LONG, "FEWEST_BLOCKS", 2)
    patch.setattr(PROGRAM, "FEW_STATES", 0.0)
    patch.setattr(PATH, "STRIDE", 1)
    patch.setattr(PATH, "FEWEST", 1)
    patch.setattr(PATH, "WINDOW", window)
    for name in ("FEW_ROWS", "MOST_ROWS", "WIDE_ROWS"):
        patch.setattr(BLOCKS, name, rows)


def chain(length: int, seed: int | None = 0, states: int = 3) -> Problem:
    """Return neighbours with random costs, and residual edges two further on; without a seed, all neighbours alike."""
    factors = []
    for number in range(length):
        draw = random.Random(seed if seed is None else seed * 1000 + number)
        for onward in (1, 2):
            draw = random.Random(onward) if seed is None else draw
            table: dict[Row, float] = {
                (f"s{i}", f"s{j}"): float(draw.randint(0, 99)) for i in range(states) for j in range(states)
            }
            factors.append(Factor(f"f{number:03} {onward}", (f"v{number:03}", f"v{number + onward:03}"), table))
    return Problem(tuple(factors))


@pytest.mark.slow
@settings(max_examples=80, derandomize=True, deadline=None, database=None)
@given(
    problem=problems(),
    window=st.integers(1, 4),
    share=st.sampled_from((0.0, 0.05, 1.0)),
    relaxed=st.sampled_from((1, 10_000)),
    limited=st.booleans(),
)
def test_messages_lead_to_the_optimum_and_bounds_are_true_whenever_the_time_is_over(
    problem: Problem, window: int, share: float, relaxed: int, limited: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, window, share)
        patch.setattr(LINEAR, "WINDOW_STATES", relaxed)
        try:
            best = brute_force(problem).total_us
        except InfeasibleError:
            with pytest.raises(InfeasibleError):
                solve_long(problem)
            return
        found = solve_long(problem, time_limit_s=0 if limited else None)
    assert found.total_us == problem.cost_us(found.states)
    assert found.lower_bound_us <= best * (1 + 1e-9) <= found.total_us * (1 + 2e-9)
    if not limited:
        assert found.total_us == found.lower_bound_us == best


def steps(length: int, seed: int, states: int = 8) -> Problem:
    """Return neighbours of which each is the one before or a step on, so most states that a block shares disagree."""
    draw, factors = random.Random(seed), []
    for number in range(length):
        for onward in (1, 2):
            table: dict[Row, float] = {
                (f"s{i}", f"s{(i + step) % states}"): float(draw.randint(0, 99))
                for i in range(states)
                for step in range(onward + 1)
            }
            factors.append(Factor(f"f{number:03} {onward}", (f"v{number:03}", f"v{number + onward:03}"), table))
    return Problem(tuple(factors))


@pytest.mark.slow
@pytest.mark.parametrize("patience", [0, 3])
def test_a_block_that_agrees_with_nothing_after_it_is_read_together_with_that(
    patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[int] = []
    read = MESSAGES.MessagePassing._read_together

    def counted(self: object, *arguments: object) -> object:
        together.append(1)
        return read(self, *arguments)

    wanted = [exact(steps(20, seed)).total_us for seed in range(5)]
    small_blocks(monkeypatch, window=3)
    monkeypatch.setattr(MESSAGES, "PATIENCE", patience)
    monkeypatch.setattr(MESSAGES.MessagePassing, "_read_together", counted)
    for seed, best in enumerate(wanted):
        problem = steps(20, seed)
        assert solve_long(problem).total_us == best
        found = solve_long(problem, time_limit_s=0)
        assert found.lower_bound_us <= best <= found.total_us == problem.cost_us(found.states)
    assert together


def test_a_long_chain_is_cut_where_it_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = chain(60)
    whole = exact(problem)
    small_blocks(monkeypatch, 4, 0.05, 1e5)
    network = encode(problem)
    blocks = path_decomposition(dict(enumerate(network.tables)), network.state_counts)
    assert len(blocks) > 10
    assert max(len(block.right) for block in blocks) == 2
    assert sorted(place for block in blocks for place in block.tables) == list(range(len(network.tables)))
    for before, after in itertools.pairwise(blocks):
        assert before.right == after.left
    assert solve_long(problem).total_us == whole.total_us


def test_what_every_block_reads_is_part_of_every_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 4, 0.05, 1e5)
    monkeypatch.setattr(PATH, "MOST_NEIGHBOURS", 8)
    table: dict[Row, float] = {("a", "s0"): 0.0, ("b", "s1"): 0.0, ("b", "s2"): 1.0, ("b", "s0"): 1.0}
    masks = [Factor(f"mask {number}", ("mask", f"v{number:03}"), table) for number in range(20)]
    problem = Problem((*chain(20).factors, *masks))
    network = encode(problem)
    blocks = path_decomposition(dict(enumerate(network.tables)), network.state_counts)
    assert len(blocks) > 4
    assert all(network.names.index("mask") in block.right for block in blocks[:-3])
    found = solve_long(problem)
    assert found.total_us == exact(problem).total_us


def test_equal_blocks_are_made_ready_and_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 4, 1.0, 1e5)
    made: list[int] = []
    sent: list[int] = []
    solver = BLOCKS.BlockSolver

    class Counted(solver):  # type: ignore[misc,valid-type]
        def __init__(self, *args: object) -> None:
            made.append(1)
            super().__init__(*args)

        def message(self, *args: object) -> object:
            sent.append(1)
            return super().message(*args)

    monkeypatch.setattr(MESSAGES, "BlockSolver", Counted)
    problem = chain(200, None)
    found = solve_long(problem)
    assert len(made) < 12
    assert len(sent) < 40
    assert found.total_us == pytest.approx(exact(problem).total_us, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("few_states", [0.0, 20.0], ids=["messages", "program"])
def test_a_gap_that_is_allowed_is_kept(monkeypatch: pytest.MonkeyPatch, few_states: float) -> None:
    monkeypatch.setattr(PROGRAM, "FEW_STATES", few_states)
    problem = synthetic_problem(220, 3)
    assert len(problem.variables) > LONG.LONG
    proven, near = solve_long(problem), solve_long(problem, gap=0.01)
    assert proven.total_us == proven.lower_bound_us
    assert near.lower_bound_us <= proven.total_us <= near.total_us <= near.lower_bound_us * 1.01


def test_contradictions_in_a_long_problem_are_named() -> None:
    broken = [Factor("makes", ("v300",), {("s0",): 0.0}), Factor("reads", ("v300",), {("s1",): 0.0})]
    with pytest.raises(InfeasibleError, match="'makes', 'reads' contradict each other"):
        solve_long(Problem((*chain(450).factors, *broken)))
