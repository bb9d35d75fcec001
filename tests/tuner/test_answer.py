"""The answer: on what was recorded of an encoder layer, and on a small model with made-up times."""

import pytest

from autotuner.database import Database
from autotuner.ir.models import Model
from autotuner.ir.records import Measurement
from autotuner.kernels import KERNELS
from autotuner.plan.configuration import Configuration
from autotuner.solve import SOLVERS
from autotuner.solve.baselines import default_us, is_declared
from autotuner.solve.problem.formulate import formulate
from autotuner.tuner import Replay, build_configuration
from autotuner.tuner.answer import own_bests_us
from autotuner.tuner.solving import solved
from tests.made_up import HERE, space_of, times
from tests.solve.problem.walking import contradictions
from tests.tuner.asking import tune
from tests.tuner.conftest import RECORDED, Recorded

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(recorded: Recorded) -> Configuration:
    """The answer to what was recorded."""
    return build_configuration(recorded.model, recorded.space, recorded.measurements, recorded.environment, {})


def test_a_problem_is_solved_again_where_a_time_has_changed_alone(small: Model) -> None:
    space = space_of(small)
    unpriced, known = formulate(space, saving=False), times(space.calls)
    problem, fastest = solved(unpriced, known, "exact")
    assert solved(unpriced, dict(known), "exact") == (problem, fastest)
    assert unpriced.solved is not None
    assert unpriced.solved[1] is fastest
    key = problem.calls(fastest)[0]
    slower = {**known, key: Measurement("ok", median_us=1000.0)}
    assert solved(unpriced, slower, "exact")[1].total_us > fastest.total_us
    assert solved(unpriced, known, "shortest_path")[1].solver == "shortest_path"


def test_the_run_finds_the_exact_optimum_of_what_was_recorded(recorded: Recorded, database: Database) -> None:
    assert RECORDED.stat().st_size < 300 * 1024
    found = tune(recorded.model, recorded.file, database, Replay(recorded.environment, recorded.measurements))
    certificate, space = found.certificate, recorded.space
    costs = {key: m.median_us for key, m in recorded.measurements.items() if m.median_us is not None}
    best = SOLVERS["exact"](formulate(space).priced(costs).problem)
    assert certificate.solver == "exact"
    assert certificate.predicted_us == pytest.approx(best.total_us)
    assert certificate.predicted_us == pytest.approx(sum(step.predicted_us for step in found.steps))
    assert 0 < certificate.lower_bound_us <= certificate.predicted_us
    assert certificate.lower_bound_us == pytest.approx(certificate.predicted_us)
    assert (certificate.proven_gap, certificate.estimated_gap) == (0.0, 0.0)
    assert certificate.baseline_us is not None
    assert certificate.baseline_us >= certificate.predicted_us
    assert certificate.default_us is not None
    assert certificate.default_us > certificate.predicted_us
    assert contradictions(space.graph, space.given, found.steps) == []
    assert found.counts["calls"] == found.counts["measured"] == len(space.calls)
    assert found.counts["reused"] == found.counts["unknown"] == 0
    assert found.bytes_moved["chosen"] < found.bytes_moved["unfused"]


def test_every_step_costs_what_was_measured_for_its_call(recorded: Recorded, found: Configuration) -> None:
    for step in found.steps:
        assert 0 <= step.bound_us <= step.predicted_us
        measured = recorded.measurements[step.measured_call(recorded.space.graph).key]
        assert measured.median_us == step.predicted_us
    assert any(step.adjacent for step in found.steps)


def test_each_step_says_what_it_loses_to_its_own_best_and_a_conversion_is_all_loss(
    recorded: Recorded, found: Configuration
) -> None:
    medians = {key: m.median_us for key, m in recorded.measurements.items() if m.median_us is not None}
    best: dict[tuple[str, ...], float] = {}
    for choice in recorded.space.choices:
        names, cost = choice.cover.operators, medians.get(choice.call.key)
        if cost is not None:
            best[names] = min(cost, best.get(names, cost))
    losses = [step.predicted_us - step.bound_us for step in found.steps]
    for step, loss in zip(found.steps, losses, strict=True):
        assert loss == step.predicted_us - (0.0 if step.is_conversion else best[step.operators])
    assert any(step.is_conversion for step in found.steps)
    assert any(loss > 0 for step, loss in zip(found.steps, losses, strict=True) if not step.is_conversion)


def test_each_step_of_an_optimum_says_what_the_best_other_way_would_cost_in_all(found: Configuration) -> None:
    for step in found.steps:
        if step.is_conversion:
            assert step.alternative is None
        elif step.alternative is not None:  # None where the time did not suffice
            other = step.alternative
            assert step.operators[0] in other.operators
            assert (other.kernel, other.inputs, other.outputs) != (step.kernel, step.inputs, step.outputs)
            assert other.extra_us >= -1e-9
            assert other.extra_low_us <= other.extra_us + 1e-9
    assert any(step.alternative is not None for step in found.steps)
    lows = [each.extra_low_us for each in found.overtaking]
    assert lows == sorted(lows)
    assert all(low < 0 for low in lows)
    assert Configuration.from_json(found.to_json()) == found


def test_a_baseline_is_not_explained(recorded: Recorded) -> None:
    given = recorded.model, recorded.space, recorded.measurements, recorded.environment, dict[str, int]()
    found = build_configuration(*given, solver="shortest_path")
    assert found.overtaking == ()
    assert all(step.alternative is None for step in found.steps)


def test_the_papers_strategy_gives_a_plan_too_and_none_cheaper(recorded: Recorded, found: Configuration) -> None:
    given = recorded.model, recorded.space, recorded.measurements, recorded.environment, dict[str, int]()
    baseline = build_configuration(*given, solver="shortest_path")
    assert baseline.certificate.solver == "shortest_path"
    assert baseline.certificate.predicted_us == pytest.approx(found.certificate.baseline_us)
    assert contradictions(recorded.space.graph, recorded.space.given, baseline.steps) == []


def test_every_fusion_is_chosen_or_rejected_by_measurement(recorded: Recorded, found: Configuration) -> None:
    chosen = {step.operators for step in found.steps if len(step.operators) > 1}
    wide = {choice.cover.operators for choice in recorded.space.choices if len(choice.cover.operators) > 1}
    assert {fusion.operators for fusion in found.fusions} == wide
    assert {fusion.operators for fusion in found.fusions if fusion.chosen} == chosen
    assert chosen
    for fusion in found.fusions:
        assert fusion.best_us is not None
        assert fusion.kernel in KERNELS
    labels = [step.label for step in found.steps]
    assert len(set(labels)) == len(labels) == len(found.steps)


def test_the_default_is_every_operator_alone_as_declared(small: Model) -> None:
    space = space_of(small)
    declared = {
        choice.call.key: 7.0 for choice in space.choices
        if len(choice.cover.operators) == 1
        and all(text == space.graph.tensors[name].axes for name, text in choice.by_tensor.items())
    }  # fmt: skip
    assert default_us(space, declared) == 7.0 * len(space.graph.operators)
    of_one = {choice.call.key for choice in space.choices if choice.cover.operators == ("product",)}
    assert default_us(space, {key: cost for key, cost in declared.items() if key not in of_one}) is None


def test_what_is_not_measured_may_cost_nothing_so_the_bound_rises_with_what_is_known(small: Model) -> None:
    space = space_of(small)
    known = times(space.calls)
    bounds, so_far = [own_bests_us(space, {})], dict[str, Measurement]()
    for key, measurement in known.items():
        so_far[key] = measurement
        bounds.append(own_bests_us(space, so_far))
    assert bounds[0] == 0.0
    assert bounds == sorted(bounds)
    whole = build_configuration(small, space, known, HERE, {}).certificate
    assert 0 < bounds[-1] <= whole.lower_bound_us == pytest.approx(whole.predicted_us)


def test_with_too_little_measured_the_gap_is_not_known(small: Model) -> None:
    space = space_of(small)
    declared = {c.cover.operators: c for c in space.choices if is_declared(space.graph, c)}
    known = times(choice.call.key for names, choice in declared.items() if len(names) == 1)
    certificate = build_configuration(small, space, known, HERE, {}).certificate
    assert (certificate.lower_bound_us, certificate.proven_gap) == (0.0, None)
