"""Two tuning runs at once on one database: each call is measured by one of them."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from autotuner.database import open_database
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

    def measure(self, races: Sequence[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
        if not self.asked:
            self.barrier.wait(WAIT_S)
        return super().measure(races)


@pytest.mark.slow
def test_two_jobs_at_once_measure_a_shared_candidate_once(small: Model, tmp_path: Path) -> None:
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
    assert sorted(measurers[0].asked + measurers[1].asked) == sorted(known)
    assert measurers[0].asked
    assert measurers[1].asked
    assert found[0].certificate.predicted_us == found[1].certificate.predicted_us
    assert {one.counts["measured"] + one.counts["reused"] for one in found.values()} == {len(known)}


def test_what_another_run_has_in_hand_is_waited_for(small: Model, tmp_path: Path) -> None:
    known = times(space_of(small).calls)
    other_key = sorted(known)[0]
    call = space_of(small).calls[other_key]
    with open_database(tmp_path / "shared.sqlite") as database:
        database.remember(HERE)
        assert database.claim_calls(HERE.key, "elsewhere/1:1:1", [other_key]) == {other_key}
        watched: list[int] = []

        def watch(progress: Progress) -> None:
            watched.append(progress.done)
            if len(watched) > len(known):  # all else is measured by now
                database.store(HERE.key, [(call, known[other_key])])
                database.release_calls("elsewhere/1:1:1")

        asking = Asking(known)
        tune(small, CPU, database, asking, watch=watch)
        assert other_key not in asking.asked


def test_a_run_that_fails_leaves_no_claim(small: Model, tmp_path: Path) -> None:
    known = times(space_of(small).calls)
    with open_database(tmp_path / "shared.sqlite") as database:
        with pytest.raises(KeyboardInterrupt):
            tune(small, CPU, database, Asking(known, stop_after=3))
        assert database.claim_calls(HERE.key, "elsewhere/1:1:1", list(known)) == set(known)
