"""Tuning on several simulated devices: the answer of one device, sooner, within the same limits."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from autotuner.database import open_database
from autotuner.ir.models import Model
from autotuner.ir.records import Call, Measurement
from autotuner.plan.configuration import Configuration
from autotuner.settings import Limits
from autotuner.tuner import Progress, TuningPolicy
from autotuner.tuner.finals import FINALISTS_MAX, RIVAL_FACTOR, Finals
from autotuner.tuner.ledger import Ledger
from autotuner.tuner.races import races
from autotuner.tuner.runner import RaceRunner
from autotuner.tuner.state import TuningState
from scripts.bench.simulated_fleet import Device, Durations, SimulatedFleet, Simulation
from tests.made_up import CPU, HERE, space_of, times
from tests.tuner.asking import Asking, tune
from tests.tuner.beside import CompilingBeside
from tests.tuner.test_lazy import LAZY, PATIENT, TWENTY, slower

DURATIONS = Durations({"torch": 0.05, "inductor": 0.3, "onednn": 0.01}, compile_s=1.0)

SHORT = 4
"""Calls of a batch in these tests."""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Races of the small model have eight calls at most."""
    monkeypatch.setattr("autotuner.tuner.batches.CALLS_MAX", SHORT)
    monkeypatch.setattr("autotuner.tuner.runner.CALLS_MAX", SHORT)


def simulated(
    model: Model, folder: Path, devices: Sequence[Device], known: dict[str, Measurement] | None = None, **asked: Any
) -> tuple[Configuration, Simulation, list[Progress]]:
    """Tune on simulated devices; what is asked beside the model is given by name."""
    simulation = Simulation(devices, DURATIONS, HERE, known or times(space_of(model).calls), TWENTY)
    seen: list[Progress] = []
    found: list[Configuration] = []

    def job(fleet: SimulatedFleet) -> None:
        with open_database(folder / f"{len(devices)}.sqlite") as database:
            found.append(tune(model, CPU, database, fleet, watch=seen.append, **asked))
            database.find(HERE.key, list(simulation.recorded))

    simulation.add("job", job)
    simulation.run()
    return found[0], simulation, seen


def busy(simulation: Simulation) -> list[float]:
    return [device.busy_s for device in simulation.devices]


def test_four_devices_find_what_one_finds_and_share_the_work(small: Model, tmp_path: Path) -> None:
    alone, one, _ = simulated(small, tmp_path, [Device()])
    together, four, seen = simulated(small, tmp_path, [Device() for _ in range(4)])
    assert together.steps == alone.steps
    assert together.certificate.predicted_us == alone.certificate.predicted_us
    assert together.counts == alone.counts
    assert max(busy(four)) < 0.4 * sum(busy(one))
    measuring = [progress.done for progress in seen if progress.stage == "measure"]
    assert measuring == sorted(measuring)
    assert measuring[-1] == together.counts["calls"] == seen[-1].measured


@pytest.mark.slow
@pytest.mark.parametrize("policy", [LAZY, PATIENT])
def test_whether_four_devices_measure_what_matters_or_everything_the_plan_is_the_same(
    small: Model, tmp_path: Path, policy: TuningPolicy
) -> None:
    known = slower(small)
    alone, _, _ = simulated(small, tmp_path, [Device()], known, policy=policy)
    together, _, _ = simulated(small, tmp_path, [Device() for _ in range(4)], known, policy=policy)
    assert together.certificate.predicted_us == alone.certificate.predicted_us
    assert together.certificate.proven_gap == 0.0
    assert (together.counts["measured"] < together.counts["calls"]) == (policy is LAZY)


def test_devices_that_die_or_answer_in_part_lose_no_call(small: Model, tmp_path: Path) -> None:
    whole, _, _ = simulated(small, tmp_path, [Device() for _ in range(2)])
    fates: list[Any] = ["dies", "ok", "part", "dies", "dies", "part"] * 2
    hurt, simulation, _ = simulated(small, tmp_path, [Device(fates=fates[:]), Device(fates=fates[1:]), Device()])
    assert hurt.steps == whole.steps
    assert hurt.counts == whole.counts
    assert not simulation.devices[0].fates


def test_a_slower_device_does_not_change_the_answer(small: Model, tmp_path: Path) -> None:
    known = {
        key: Measurement("ok", us, us, us) for key, m in times(space_of(small).calls).items() if (us := m.median_us)
    }
    even, _, _ = simulated(small, tmp_path, [Device() for _ in range(2)], known)
    uneven, _, _ = simulated(small, tmp_path, [Device(), Device(speed=1.02), Device(speed=0.99)], known)
    found, best = uneven.certificate.predicted_us, even.certificate.predicted_us
    assert found == pytest.approx(best, rel=0.021)


def test_a_limit_of_measurements_holds_whatever_is_under_way(small: Model, tmp_path: Path) -> None:
    limit = len(space_of(small).graph.operators) + 4
    found, simulation, _ = simulated(
        small, tmp_path, [Device() for _ in range(8)], exhaustive=True, limits=Limits(measurements=limit)
    )
    longest = max(map(len, races(space_of(small), set(space_of(small).calls))))
    assert limit <= found.counts["measured"] < limit + longest
    assert found.counts["unknown"] > 0
    assert sum(busy(simulation)) > 0


class Several(Asking):
    """A replay of several devices that keeps its races."""

    devices = 4

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.races: list[list[Call]] = []

    def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
        for race in races:
            self.races.append(list(race))
            yield from super().measure([race])


class SeveralBeside(CompilingBeside, Several):
    """Keeps how many calls were compiled by each race."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.compiled_by: list[int] = []

    def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
        for result in super().measure(races):
            self.compiled_by.append(len(self.order))
            yield result


def test_several_devices_compile_while_they_measure_what_needs_no_compiler(small: Model, tmp_path: Path) -> None:
    several = SeveralBeside(times(space_of(small).calls))
    with open_database(tmp_path / "several.sqlite") as database:
        tune(small, CPU, database, several, policy=PATIENT)
    assert len(several.order) == 2
    alone = len(space_of(small).graph.operators)
    assert several.compiled_by[alone] > 0, "it does not wait until all that needs no compiler is measured"
    assert several.rested == 0


def test_what_is_chosen_races_against_its_rivals_on_one_device(small: Model, tmp_path: Path) -> None:
    space = space_of(small)
    known = times(space.calls)
    race = max(races(space, set(known)), key=len)
    for number, call in enumerate(race):
        known[call.key] = Measurement("ok", 100.0 + number)
    several = Several(known)
    with open_database(tmp_path / "several.sqlite") as database:
        database.remember(HERE)
        ledger = Ledger(space, database, HERE.key, TuningState(space, lambda _: None))
        RaceRunner(ledger, several).measure([race])
        Finals(ledger, several).confirm([race[0]])
    final = several.races[-1]
    rivals = [call for call in race[1:] if (known[call.key].median_us or 0.0) <= RIVAL_FACTOR * 100.0]
    assert final == [race[0], *rivals][:FINALISTS_MAX]
    assert len(final) > 1
    assert not {call.key for call in final} & ledger.unconfirmed


def test_a_large_race_is_led_by_the_fastest_known_call_which_is_not_counted_again(small: Model, tmp_path: Path) -> None:
    space = space_of(small)
    race = max(races(space, set(space.calls)), key=len)
    assert len(race) > SHORT + 2
    known = times(space.calls) | {race[1].key: Measurement("ok", 0.5)}
    several = Several(known)
    with open_database(tmp_path / "several.sqlite") as database:
        database.remember(HERE)
        state = TuningState(space, lambda _: None)
        ledger = Ledger(space, database, HERE.key, state)
        runner = RaceRunner(ledger, several)
        runner.measure([race[:2]])
        runner.measure([race])
    assert several.races[-1] == [race[1], *race[2:]]
    assert Counter(several.asked).most_common(1)[0][1] == 1
    assert (state.measured, ledger.done) == (len(race), len(race))


def test_whether_lazy_measuring_pays_divides_by_the_devices() -> None:
    policy = TuningPolicy(spared_share=0.5, alone_factor=1.0, solutions=10)
    assert policy.lazy_pays(left=100, alone_s=1.0, solve_s=1.0)
    assert policy.lazy_pays(left=100, alone_s=1.0, solve_s=1.0, devices=4)
    assert not policy.lazy_pays(left=100, alone_s=1.0, solve_s=1.0, devices=8)
