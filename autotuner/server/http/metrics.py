"""Metrics: figures of requests and of the database, in Prometheus' text format.

Labels have few values: a route's template and never a path, no names of models, jobs or clients. Processes that share a
folder (`PROMETHEUS_MULTIPROC_DIR`, which must be set before this module is imported) answer for all of them.
"""

from collections import Counter as Numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.values import MutexValue, ValueClass

from autotuner.database import Database, Inventory
from autotuner.errors import DatabaseError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for each other one, which nobody asks for

METHODS = ("GET", "HEAD", "POST", "OPTIONS")
FRESH_S = 5.0
"""For how long the numbers of the database are taken for what they are."""


@dataclass(frozen=True, slots=True)
class DatabaseFigures:
    """The numbers of a database, its workers by device type, and GPUs of fleets; None where it cannot be read."""

    inventory: Inventory | None
    workers: dict[str, int]
    gpus: dict[tuple[str, str], int]


class Metrics:
    """Metrics of one service: of this process, or of all that share its folder.

    Args:
        database: whose jobs, workers and measurements are counted.
        version: of this package.
    """

    def __init__(self, database: Database, version: str) -> None:
        self._database = database
        self._found: tuple[float, DatabaseFigures] = (-FRESH_S, DatabaseFigures(None, {}, {}))
        self._own = CollectorRegistry()
        self._requests = Counter(
            "autotuner_http_requests", "Answered requests.", ("method", "route", "status"), registry=self._own
        )
        self._seconds = Histogram(
            "autotuner_http_request_duration_seconds",
            "Time from a request's headers to the end of its answer; streams of events are left out.",
            ("route",), buckets=BUCKETS_S, registry=self._own,
        )  # fmt: skip
        self._open = Gauge(
            "autotuner_event_streams", "Open streams of events.", registry=self._own, multiprocess_mode="livesum"
        )
        self._shown = self._own
        if ValueClass is not MutexValue:
            self._shown = CollectorRegistry()
            MultiProcessCollector(self._shown)  # type: ignore[no-untyped-call]
        else:
            ProcessCollector(registry=self._own)
        self._shown.register(_OfDatabase(self, version))

    def count(self, method: str, route: str | None, status: int, seconds: float | None) -> None:
        """Count a request that was answered.

        Args:
            route: its template; None where nothing has that path.
            seconds: None for a stream.
        """
        route = route or "none"
        self._requests.labels(method if method in METHODS else "other", route, str(status)).inc()
        if seconds is not None:
            self._seconds.labels(route).observe(seconds)

    def count_streams(self, change: int) -> None:
        """Count streams of events that were opened, or have ended."""
        self._open.inc(change)

    def page(self) -> bytes:
        """Return all figures; those of the database are read again after some seconds. It may wait for the database."""
        if monotonic() - self._found[0] > FRESH_S:
            self._found = monotonic(), self._read()
        return generate_latest(self._shown)

    def disks(self) -> Iterable[Metric]:
        """Return what is left on the disks of this service, as it is now: no database is asked for it."""
        space = self._database.space
        free = {"database": space.free_bytes, "temporary": space.temporary_free_bytes}
        yield _gauge(
            "autotuner_disk_free_bytes", "Space left for the database, where it is a file, and for temporary files.",
            {(volume,): float(number) for volume, number in free.items() if number is not None}, "volume",
        )  # fmt: skip
        yield _gauge(
            "autotuner_disk_full", "1 where the database cannot be written for want of space, else 0.",
            {(): float(space.is_full)},
        )  # fmt: skip

    @property
    def found(self) -> DatabaseFigures:
        return self._found[1]

    def _read(self) -> DatabaseFigures:
        try:
            inventory = self._database.inventory.take()
            workers = Numbers(worker.device_type for worker in self._database.queue.workers())
            gpus = Numbers((gpu.device_type, "used" if gpu.used else "left_out") for gpu in self._database.gpus.all())
        except DatabaseError:
            return DatabaseFigures(None, {}, {})
        return DatabaseFigures(inventory, dict(workers), dict(gpus))


class _OfDatabase(Collector):
    """Figures that were read from the database last."""

    def __init__(self, metrics: Metrics, version: str) -> None:
        self._metrics, self._version = metrics, version

    def collect(self) -> Iterable[Metric]:
        found = self._metrics.found
        up = found.inventory is not None
        yield _gauge("autotuner_build_info", "Version of the service.", {(self._version,): 1.0}, "version")
        yield _gauge("autotuner_database_up", "1 where the database can be read, else 0.", {(): float(up)})
        yield from self._metrics.disks()
        if found.inventory is None:
            return
        counted = found.inventory
        yield _gauge("autotuner_jobs", "Jobs by state.", {(s,): float(n) for s, n in counted.jobs.items()}, "state")
        yield _gauge(
            "autotuner_queue_oldest_seconds", "Time since the oldest job that waits was submitted, 0 without one.",
            {(): counted.oldest_queued_s},
        )  # fmt: skip
        workers = {(kind,): float(number) for kind, number in found.workers.items()}
        yield _gauge("autotuner_workers", "Workers that take jobs.", workers, "device_type")
        gpus = {(kind, state): float(number) for (kind, state), number in found.gpus.items()}
        yield _gauge("autotuner_gpus", "GPUs of fleets: those that measure, and those left out.", gpus, "device_type",
                     "state")  # fmt: skip
        yield _gauge("autotuner_measurements", "Measurements that are stored.", {(): float(counted.measurements)})
        yield _gauge("autotuner_configurations", "Configurations that are stored.", {(): float(counted.configurations)})


def _gauge(name: str, description: str, values: Mapping[Any, float], *labels: str) -> Metric:
    family = GaugeMetricFamily(name, description, labels=labels)
    for given, value in values.items():
        family.add_metric(given, value)
    return family
