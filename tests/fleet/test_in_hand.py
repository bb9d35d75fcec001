"""Jobs at once on one cluster: what they have in common is timed once."""

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from autotuner.database import open_database
from autotuner.fleet.fleet_measurer import FleetMeasurer
from autotuner.fleet.in_hand import LEASE_S, InHand
from autotuner.fleet.pool import Answered, Began, Event, Joined, Question
from autotuner.fleet.roster import Gpu, Roster
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import load_model
from autotuner.ir.records import Call, Measurement
from autotuner.plan.request import Request
from autotuner.settings import TuneOptions
from autotuner.space import build_space, space_file
from autotuner.tuner import Replay, Tuned, tune
from tests.fleet.calls import Clock, gpu
from tests.made_up import HERE, feed_forward, times, without_compilers


def test_a_call_is_one_jobs_until_it_is_released_or_the_job_is_gone() -> None:
    clock = Clock()
    account = InHand(clock)
    assert account.claim("a", ["x", "y"]) == ([], False)
    assert account.claim("b", ["y", "z"]) == (["y"], True)
    assert account.claim("a", ["x", "z"]) == (["z"], True)
    account.release("b", ["y", "z"])
    assert account.claim("a", ["y", "z"]) == ([], True), "nobody releases what another one has"
    account.leave("a")
    assert account.claim("b", ["x", "y"]) == ([], False)
    account.claim("a", [])
    clock.now += LEASE_S - 1
    assert account.claim("a", ["x"]) == (["x"], True)
    clock.now += 2
    assert account.claim("a", ["x"]) == ([], False), "b has said nothing for long"


class JobsClaims:
    """The calls in hand of several jobs of one process."""

    lock = threading.Lock()

    def __init__(self, account: InHand, job: str) -> None:
        self._account, self._job = account, job
        self.has_others = False

    def claim(self, keys: Sequence[str]) -> Collection[str]:
        with self.lock:
            elsewhere, self.has_others = self._account.claim(self._job, keys)
            return elsewhere

    def release(self, keys: Collection[str]) -> None:
        with self.lock:
            self._account.release(self._job, keys)

    def leave(self) -> None:
        with self.lock:
            self._account.leave(self._job)


CALL_S = 0.005
"""Of a made-up GPU: longer than what a job does between its calls, so that both jobs come to their share."""


class SlowPool:
    """Actors of made-up GPUs that take a while for each call; a call is timed as often as `timed` has it."""

    def __init__(self, gpus: Sequence[Gpu], known: Mapping[str, Measurement], timed: list[str], seconds: float) -> None:
        self._free = {each.slot: 0.0 for each in gpus}
        self._events: list[tuple[float, Event]] = [(0.0, Joined(each)) for each in gpus]
        self._known, self._timed, self._seconds = known, timed, seconds

    def send(self, ticket: int, slot: str, question: Question, request: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if question == "ask":
            self._events.append((now, Answered(ticket, {"noise": 0.0, "ceilings": {}})))
            return
        keys = [Call.from_json(value).key for value in request["calls"]]
        self._timed += keys
        took_s = self._seconds * len(keys)
        self._free[slot] = max(self._free[slot], now) + took_s
        results = [[key, self._known[key].to_json()] for key in keys]
        self._events.append((now, Began(ticket)))
        self._events.append((self._free[slot], Answered(ticket, {"results": results, "took_s": took_s})))

    def poll(self, timeout_s: float) -> Sequence[Event]:
        until = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            found = [event for at, event in self._events if at <= now]
            self._events = [(at, event) for at, event in self._events if at > now]
            if found or now > until:
                return found
            time.sleep(0.002)

    def forget(self, ticket: int) -> None:
        """Go on with it: what it answers counts for nothing."""

    def close(self) -> None:
        """Close nothing."""


class Jobs:
    """Jobs on one database and two GPUs each, of the same request."""

    def __init__(self, folder: Path, *, exhaustive: bool) -> None:
        self._url = folder / "jobs.sqlite"
        self.file = space_file("cpu", without_compilers(folder))
        model = load_model(str(feed_forward(folder))).instantiate("small")
        self.known = times(build_space(training_graph(model.graph()), self.file).calls)
        self.request = Request(model, "cpu", options=TuneOptions(exhaustive=exhaustive, end_to_end=False))
        self.timed: dict[str, list[str]] = {}
        self._account = InHand()
        self._start = threading.Barrier(2)
        with open_database(folder / "quiet.sqlite") as quiet:
            self.quiet = tune(self.request, self.file, quiet, Replay(HERE, self.known))
        with open_database(self._url):
            pass

    def run(self, name: str, *, wait: bool = True) -> Tuned:
        timed = self.timed[name] = []
        gpus = [gpu(number, HERE) for number in range(2)]
        with open_database(self._url) as database:
            if wait:
                self._start.wait(30)
            pool = SlowPool(gpus, self.known, timed, CALL_S)
            with (
                FleetMeasurer(pool, Roster(), gpus=2, claims=lambda _: JobsClaims(self._account, name)) as measurer,
                database.writing_behind(),
            ):
                return tune(self.request, self.file, database, measurer)

    def stored(self) -> dict[str, Measurement]:
        with open_database(self._url) as database:
            found = database.measurements()
        assert len(found) == len({each.call.key for each in found})
        return {each.call.key: each.measurement for each in found}


@pytest.mark.slow
@pytest.mark.parametrize("exhaustive", [True, False])
def test_two_jobs_at_once_time_what_they_have_in_common_once(tmp_path: Path, exhaustive: bool) -> None:
    jobs = Jobs(tmp_path, exhaustive=exhaustive)
    with ThreadPoolExecutor(2) as both:
        found = list(both.map(jobs.run, "ab"))
    stored = jobs.stored()
    measured = [answer.configuration.counts["measured"] for answer in found]
    assert sum(measured) == len(stored), "once each: alone, both would measure all"
    assert min(measured) > 0.2 * len(stored), "each job does its part"
    if exhaustive:
        assert stored == jobs.known
    for answer in found:
        assert answer.complete
        assert (
            answer.configuration.to_json()["certificate"]["predicted_us"]
            == (jobs.quiet.configuration.to_json()["certificate"]["predicted_us"])
        )
        assert answer.configuration.counts["reused"] == len(stored) - answer.configuration.counts["measured"]


@pytest.mark.slow
def test_a_job_that_begins_later_times_nothing_that_another_one_has_timed(tmp_path: Path) -> None:
    """Results of a job that knows of no other one are not stored at once."""
    jobs = Jobs(tmp_path, exhaustive=True)
    with ThreadPoolExecutor(1) as apart:
        first = apart.submit(jobs.run, "a", wait=False)
        while len(jobs.timed.get("a", ())) < len(jobs.known) // 3:
            time.sleep(0.001)
        second = jobs.run("b", wait=False)
        measured = [answer.configuration.counts["measured"] for answer in (first.result(), second)]
    assert sum(measured) == len(jobs.known)
    assert min(measured) > 0
    assert jobs.stored() == jobs.known


@pytest.mark.slow
def test_a_job_measures_what_a_job_that_has_died_had_in_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotuner.fleet.in_hand.LEASE_S", 1.0)
    jobs = Jobs(tmp_path, exhaustive=True)
    keys = sorted(jobs.known)[:20]
    assert jobs._account.claim("died", keys) == ([], False)
    began = time.monotonic()
    answer = jobs.run("a", wait=False)
    assert time.monotonic() - began > 1.0
    assert answer.configuration.counts["measured"] == len(jobs.known)
    assert set(jobs.timed["a"][: len(jobs.known) - len(keys)]) == jobs.known.keys() - set(keys), "they come last"
    assert jobs.stored() == jobs.known
