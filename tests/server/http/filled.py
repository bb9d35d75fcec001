"""What the tests of the service find in its database, and a worker that is none."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autotuner.database import Database, Job
from autotuner.ir.models import Model, named_model
from autotuner.ir.records import Call, Candidate, Environment, Measurement, Node, Subgraph, TensorType
from autotuner.plan.configuration import Configuration
from autotuner.plan.request import Request

WORKER = "a worker"
XEON = [("cpu", "Xeon")]
HERE = Environment("cpu", "Xeon", (("cores", 2),), (("cache", "warm"),))
ELSEWHERE = Environment("cpu", "EPYC", (("cores", 64),))
TINY = named_model("bert-encoder:tiny")
PROGRESS: dict[str, Any] = {
    "stage": "measure", "done": 5, "total": 20, "measured": 4, "reused": 1, "failed": 2, "best_us": 15.0,
    "bound_us": 10.0, "eta_s": 3.0, "left_s": 4.0, "gap": 0.5, "estimated_gap": 0.1,
}  # fmt: skip


def fill(database: Database, configuration: Configuration) -> None:
    """Store two devices, three measurements, an answer for `TINY`, and a job of every state: ids 1 to 5.

    One of them runs at `WORKER`, whose lock somebody must hold.
    """
    for environment in (HERE, ELSEWHERE):
        database.remember(environment)
    database.queue.greet(WORKER, HERE.device_type, HERE.device_name)
    database.store(
        HERE.key,
        [
            (call("gelu_erf"), Measurement("ok", 4.0, 3.0, 5.0, (3.0, 4.0, 5.0))),
            (call("bias", "gelu_erf"), Measurement("ok", 2.0)),
            (call("softmax"), Measurement("refused", message="the row is too long")),
        ],
    )
    number = answer(database, configuration)
    for state in ("finished", "failed", "cancelled"):
        job = enqueue(database)
        database.queue.claim(WORKER, XEON)
        found = number if state == "finished" else None
        database.queue.finish(job.id, 1, state, counts={"calls": 3}, configuration_id=found)
    running = enqueue(database)
    database.queue.claim(WORKER, XEON)
    database.queue.report(running.id, 1, progress=PROGRESS)
    enqueue(database)


def call(*kinds: str) -> Call:
    nodes = tuple(Node(kind, "ab->ab", (i,), (i + 1,)) for i, kind in enumerate(kinds))
    tensors = (TensorType((2, 3), "float32"),) * (len(kinds) + 1)
    return Call(Subgraph(nodes, tensors, (0,), (len(kinds),)), Candidate(f"torch_{kinds[0]}", ("ab", "ba")))


def enqueue(database: Database, model: Model = TINY) -> Job:
    request = Request(model)
    return database.queue.enqueue(model=model.reference, request=request.to_json(), device_type="cpu")


def answer(
    database: Database,
    configuration: Configuration,
    *,
    model: Model = TINY,
    environment: Environment = HERE,
    complete: bool = True,
) -> int:
    """Store an answer for a model, whatever the configuration is for, and return its id."""
    return database.configurations.save(
        request_key="made up", environment_key=environment.key, family_key=model.family, dtype=model.dtype,
        extents=model.extents, complete=complete, document=configuration.to_json(), total_us=12.5,
    )  # fmt: skip


@contextmanager
def ending_jobs(database: Database) -> Iterator[None]:
    """Take jobs and end them, each in another way, as long as the context lasts."""
    over, name = threading.Event(), "ending"
    states = ("finished", "failed", "cancelled")

    def work() -> None:
        while not over.wait(0.02):
            for job in database.queue.claim(name, XEON):
                database.queue.report(job.id, 1, progress=PROGRESS)
                state = states[job.id % 3]
                found = 1 if state == "finished" else None
                database.queue.finish(job.id, 1, state, configuration_id=found)  # type: ignore[arg-type]

    thread = threading.Thread(target=work)
    with database.locks.hold(name):
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
