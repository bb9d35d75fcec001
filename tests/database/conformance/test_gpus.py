"""GPUs of fleets: as they were told last, as long as their runner is there."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from autotuner.database import Database, FleetGpu, gpus

ME, OTHER, GONE = "fleet a:6379", "fleet b:6379", "gone"


@pytest.fixture(autouse=True)
def runners(alive: Callable[..., None]) -> None:
    alive(ME, OTHER)


def gpu(slot: str, reason: str = "", name: str = "NVIDIA H200") -> FleetGpu:
    return FleetGpu(slot, "cuda", name, not reason, reason, host=slot[:1], uuid=f"GPU-{slot}", canary_us=1.5)


def test_a_gpu_is_as_it_was_told_last_and_shown_while_its_runner_is_there(database: Database) -> None:
    before = datetime.now(UTC)
    database.gpus.report(ME, [gpu("b/0"), gpu("a/0"), gpu("a/1")])
    database.gpus.report(OTHER, [gpu("c/0")])
    database.gpus.report(GONE, [gpu("d/0")])
    slow = gpu("a/1", "its canary is +7.0% off its class")
    database.gpus.report(ME, [slow])
    assert database.gpus.all() == [gpu("a/0"), slow, gpu("b/0"), gpu("c/0")]
    assert all(before <= each.seen_at <= datetime.now(UTC) for each in database.gpus.all())
    database.gpus.forget(OTHER)
    assert [each.slot for each in database.gpus.all()] == ["a/0", "a/1", "b/0"]
    with database.locks.hold(GONE):
        assert len(database.gpus.all()) == 3, "those of runners that are gone were removed as well"


def test_between_jobs_a_runner_tells_of_hosts_that_are_gone_and_of_gpus_that_say_nothing(database: Database) -> None:
    database.gpus.report(ME, [gpu("a/0"), gpu("b/0")])
    mute = FleetGpu("c/0", "cuda", "", False, "no driver")
    database.gpus.keep(ME, {"a", "c"}, [mute])
    shown = [(each.slot, each.used, each.reason) for each in database.gpus.all()]
    assert shown == [("c/0", False, "no driver"), ("a/0", True, ""), ("b/0", False, "its host is gone")]
    database.gpus.keep(ME, {"a", "c"}, [])
    assert [each.slot for each in database.gpus.all()] == ["a/0", "b/0"]


def test_a_gpu_that_was_gone_for_long_is_forgotten(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    database.gpus.report(ME, [gpu("a/0", "its host is gone"), gpu("b/0")])
    monkeypatch.setattr(gpus, "FORGOTTEN_AFTER", timedelta(seconds=-1))
    database.gpus.report(ME, [gpu("c/0")])
    assert [each.slot for each in database.gpus.all()] == ["b/0", "c/0"]
