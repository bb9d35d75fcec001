"""Two tuning runs at once on one database: nothing is lost, and each takes what the other has stored by then."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from autotuner.database import Database, open_database
from autotuner.ir.models import Model
from autotuner.ir.records import Call, Measurement
from autotuner.plan.configuration import Configuration
from autotuner.tuner import Progress
from tests.made_up import CPU, HERE, space_of, times
from tests.tuner.asking import Asking, tune

WAIT_S = 120.0


class Together(Asking):
    """Waits before its first race until the other run is at its own."""

    barrier: threading.Barrier

    def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
        if not self.asked:
            self.barrier.wait(WAIT_S)
        return super().measure(races)


@pytest.mark.slow
def test_two_jobs_at_once_have_the_answer_of_one_and_measure_a_call_twice_at_worst(
    small: Model, tmp_path: Path
) -> None:
    known = times(space_of(small).calls)
    barrier = threading.Barrier(2)
    measurers = [Together(known), Together(known)]
    found: dict[int, Configuration] = {}

    def run(number: int) -> None:
        measurers[number].barrier = barrier
        with open_database(tmp_path / "shared.sqlite") as database:
            found[number] = tune(small, CPU, database, measurers[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    asked = Counter(measurers[0].asked + measurers[1].asked)
    assert asked.keys() == known.keys()
    assert max(asked.values()) <= len(measurers)
    assert found[0].certificate.predicted_us == found[1].certificate.predicted_us
    assert {one.counts["measured"] + one.counts["reused"] for one in found.values()} == {len(known)}
    with open_database(tmp_path / "shared.sqlite") as database:
        assert database.find(HERE.key, tuple(known)) == known
        assert database.statistics().statuses["ok"] == len(known)


def test_what_another_run_stores_meanwhile_is_not_measured(small: Model, database: Database) -> None:
    known = times(space_of(small).calls)
    calls = space_of(small).calls
    database.remember(HERE)
    told = 0

    def watch(progress: Progress) -> None:
        nonlocal told
        told += progress.stage == "measure" and progress.done == 1
        if told == 1:
            database.store(HERE.key, [(call, known[key]) for key, call in calls.items()])

    asking = Asking(known)
    found = tune(small, CPU, database, asking, watch=watch)
    assert len(asking.answered) < len(known) / 2
    assert (found.counts["measured"] + found.counts["reused"], found.counts["unknown"]) == (len(known), 0)


def test_what_both_runs_measured_is_stored_once(small: Model, tmp_path: Path) -> None:
    known = times(space_of(small).calls)
    with open_database(tmp_path / "shared.sqlite") as database:
        tune(small, CPU, database, Both(known, database))
        assert database.find(HERE.key, tuple(known)) == known
        assert database.statistics().statuses["ok"] == len(known)


class Both(Asking):
    """Another run stores each call just before this one has its result."""

    def __init__(self, known: dict[str, Measurement], database: Database) -> None:
        super().__init__(known)
        self.database = database

    def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
        for call, measurement in super().measure(races):
            self.database.store(HERE.key, [(call, measurement)])
            yield call, measurement
