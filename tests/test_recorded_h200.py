"""The recorded sweep of bert-encoder:large on an H200: complete for its kernels, and what solvers make of it."""

import pytest

from autotuner.solve import SOLVERS
from autotuner.solve.problem import Problem
from autotuner.solve.problem.formulate import formulate
from scripts.recorded import LARGE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def problem() -> Problem:
    return LARGE.problem()


def test_it_knows_every_call_of_its_kernels() -> None:
    unknown = set(LARGE.space().calls) - set(LARGE.value["measurements"])
    assert not unknown, (
        f"{LARGE.path.name} lacks {len(unknown)} calls: a kernel's rules, the space or the records have changed; tune "
        "it again on such a device and write the file with scripts/record_replay"
    )


def test_exact_proves_its_plan_on_it_and_the_papers_strategy_and_greedy_lie_above(problem: Problem) -> None:
    found = {name: SOLVERS[name](problem).total_us for name in ("exact", "shortest_path", "greedy")}
    assert SOLVERS["exact"](problem).gap == 0
    assert found["exact"] < 835
    assert found["shortest_path"] > 1.1 * found["exact"]
    assert found["greedy"] > 1.4 * found["exact"]


def test_the_plan_runs_attention_of_cudnn_and_sums_biases_in_products() -> None:
    formulation = formulate(LARGE.space()).priced(LARGE.costs_us)
    chosen = {choice.candidate.kernel for choice in formulation.chosen(SOLVERS["exact"](formulation.problem))}
    assert {"cudnn_attention", "cudnn_attention_grad", "cublaslt_matmul_bias_grad"} <= chosen
