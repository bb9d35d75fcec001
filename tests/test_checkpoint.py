"""Long work asks often whether it is to go on: counted on an encoder layer, so that no clock is read."""

import threading
from collections.abc import Callable

import pytest

from autotuner.checkpoint import OverError, checkpoint, heeding, until, watched
from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph
from autotuner.ir.models import load_model
from autotuner.solve import alternatives, exact, least_through
from autotuner.solve.problem.formulate import Formulation, formulate
from autotuner.space import Space, build_space
from autotuner.tuner.relaxation import RelaxedProblem
from tests.made_up import CPU, times

ODD = {"b": 2, "l": 5, "h": 6, "n": 2, "p": 3, "f": 7}


def asked(work: Callable[[], object]) -> int:
    """Return how often some work asks whether it is to go on."""
    times_asked = 0

    def look() -> None:
        nonlocal times_asked
        times_asked += 1

    with watched(look):
        work()
    return times_asked


def ended_at(number: int, work: Callable[[], object]) -> bool:
    """Tell whether some work ends at this checkpoint of it."""
    left = number

    def is_over() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    with pytest.raises(OverError), until(is_over):
        work()
    return left == -1


@pytest.fixture(scope="module")
def graph() -> Graph:
    return training_graph(load_model("bert-encoder").instantiate(None, ODD).graph())


@pytest.fixture(scope="module")
def space(graph: Graph) -> Space:
    return build_space(graph, CPU)


@pytest.fixture(scope="module")
def costs_us(space: Space) -> dict[str, float]:
    return {key: float(found.median_us or 0.0) for key, found in times(space.calls).items()}


@pytest.fixture(scope="module")
def formulation(space: Space, costs_us: dict[str, float]) -> Formulation:
    return formulate(space).priced(costs_us)


def test_a_space_asks_at_each_choice_and_conversion(graph: Graph, space: Space) -> None:
    found = len(space.choices) + len(space.conversions)
    assert asked(lambda: build_space(graph, CPU)) > found
    assert ended_at(found, lambda: build_space(graph, CPU))


def test_a_problem_asks_at_each_factor(space: Space, formulation: Formulation, costs_us: dict[str, float]) -> None:
    factors = len(formulation.problem.factors)
    assert asked(lambda: formulate(space).priced(costs_us)) > factors
    assert ended_at(factors, lambda: formulate(space).priced(costs_us))


@pytest.mark.slow
def test_solvers_ask_at_each_variable(space: Space, formulation: Formulation, costs_us: dict[str, float]) -> None:
    problem = formulation.problem
    solution = exact(problem)
    relaxed = RelaxedProblem(space)
    found = relaxed.solve(costs_us)
    for work in (
        lambda: exact(problem),
        lambda: least_through(problem),
        lambda: alternatives(problem, solution, problem.variables[:3]),
        lambda: relaxed.solve(costs_us),
        lambda: found.through_us(1.005 * found.bound_us),
    ):
        assert asked(work) > len(problem.variables)
        assert ended_at(len(problem.variables), work)


def test_without_a_watch_a_checkpoint_does_nothing() -> None:
    checkpoint()
    with until(lambda: False):
        checkpoint()


def test_the_outer_watch_is_asked_first_and_none_when_they_are_gone() -> None:
    seen: list[str] = []
    with watched(lambda: seen.append("outer")), watched(lambda: seen.append("inner")):
        checkpoint()
    checkpoint()
    assert seen == ["outer", "inner"]


def test_work_without_checkpoints_is_heeded_meanwhile() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        ended.wait(10)

    try:
        with pytest.raises(OverError), until(begun.is_set):
            heeding(work)
    finally:
        ended.set()


def test_what_work_in_a_thread_returns_or_raises_comes_back() -> None:
    assert heeding(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        heeding(lambda: 1 // 0)
