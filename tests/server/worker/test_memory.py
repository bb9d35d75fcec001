"""The memory of a worker's device: it is told, and a model that is larger fails before anything is measured."""

import os
from pathlib import Path
from typing import Any

import pytest

from autotuner.database import open_database
from autotuner.ir.models import named_model
from autotuner.measure.devices import device_of
from autotuner.server.worker import run
from tests.server.worker.device import enqueue


@pytest.mark.slow
def test_a_worker_tells_the_memory_of_its_cpu_and_refuses_what_is_larger(tmp_path: Path) -> None:
    memory_bytes = device_of("cpu").memory_bytes
    assert 2**28 < memory_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows = memory_bytes // (128 * 4) + 1
    with open_database(tmp_path / "jobs.sqlite") as database:
        job = enqueue(database, named_model("bert-encoder:tiny", extents={"b": rows, "l": 1}))
        told: list[Any] = []

        def log(event: str, **_: Any) -> None:
            if event == "job_taken":
                told.extend(worker.memory_bytes for worker in database.queue.workers())

        run(tmp_path / "jobs.sqlite", once=True, log=log)
        assert told == [memory_bytes]
        ended = database.queue.job(job.id)
        assert ended.state == "failed"
        assert f"tensor 'x' takes {rows * 128 * 4} bytes, and " in ended.message
        assert f" has {memory_bytes}: give smaller extents" in ended.message
        assert sum(database.statistics().statuses.values()) == 0
