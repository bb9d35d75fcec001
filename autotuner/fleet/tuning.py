"""Tuning over a fleet: the measurer of a request, and a job that its own process runs."""

from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from autotuner.database import Database
from autotuner.fleet.cluster import connected
from autotuner.fleet.fleet_measurer import FleetMeasurer, Log, Report, silent, unheard
from autotuner.fleet.handout import WINDOW
from autotuner.fleet.ray_claims import RayClaims
from autotuner.fleet.ray_pool import RayPool
from autotuner.fleet.roster import Roster
from autotuner.fleet.spec import ON_DEVICE, MeasurerSpec
from autotuner.ir.autodiff import training_graph
from autotuner.measure.devices import half_step_bytes
from autotuner.plan.configuration import Configuration
from autotuner.plan.request import Request
from autotuner.server.worker import tune_attended
from autotuner.settings import Settings
from autotuner.space import SpaceFile
from autotuner.tuner import Watch

PRIORITY_MAX = 3
"""Priorities above widen the window no further."""


@dataclass(frozen=True)
class Fleet:
    """The cluster that is used, and the measurer of its actors.

    Args:
        address: of the cluster, as HOST:PORT or "auto"; None for that of this host, or else one of its own.
        gpus: start a cluster of one's own with so many GPUs of this host.
        factory, arguments: of the measurer; see `MeasurerSpec`.
    """

    address: str | None = None
    gpus: int | None = None
    factory: str = ON_DEVICE
    arguments: dict[str, Any] = field(default_factory=dict)

    def spec(self, request: Request, settings: Settings) -> MeasurerSpec:
        """Return the measurer of a request."""
        half = half_step_bytes(training_graph(request.model.graph()))
        return self.probe(request.device_type, settings, half_step_bytes=half)

    def probe(self, device_type: str, settings: Settings, **policy: int) -> MeasurerSpec:
        """Return the measurer of no request, which says what device there is."""
        device = {"device_type": device_type, "timeout_s": settings.timeout_s, "cache_dir": str(settings.cache_dir)}
        return MeasurerSpec(self.factory, {**device, **policy, **self.arguments})


def window_of(priority: int) -> int:
    """Return how many batches a job of this priority has in hand per GPU: its share of a GPU that several jobs use."""
    return WINDOW * (1 + min(max(priority, 0), PRIORITY_MAX))


@dataclass(frozen=True)
class FleetTuning:
    """The measurer and the timing of one job on the connected cluster, as `run_job` asks for them.

    Args:
        device_name: of the GPUs; None for those of the first one that is ready.
        priority: of the job.
        job: a name that all attempts at it have, and no other job of the cluster.
    """

    fleet: Fleet
    request: Request
    settings: Settings
    _: KW_ONLY
    device_name: str | None = None
    priority: int = 0
    log: Log = silent
    report: Report = unheard
    job: str = ""

    def measuring(self, request: Request | None = None) -> FleetMeasurer:
        """Return the measurer of the request."""
        pool = RayPool(self.fleet.spec(request or self.request, self.settings))
        roster, window = Roster(device_name=self.device_name), window_of(self.priority)
        return FleetMeasurer(
            pool, roster, window=window, gpus=pool.gpus, log=self.log, report=self.report,
            claims=lambda environment: RayClaims(environment.key, self.job),
        )  # fmt: skip

    def timing(self, found: Configuration, samples: int, _waiting: object) -> Configuration:
        """Return a configuration that one of the GPUs has timed end to end."""
        with self.measuring() as measurer:
            return measurer.time_whole(found, samples)


def tune_over(
    fleet: Fleet,
    request: Request,
    database: Database,
    file: SpaceFile,
    settings: Settings,
    *,
    watch: Watch = lambda _: None,
    log: Log = silent,
) -> Configuration:
    """Run a job of one's own over a fleet, here and now, and return its answer.

    Raises:
        DeviceError: there is no such cluster.
        MeasureError: it has no GPU that can measure.
        AutotunerError: as `autotuner.server.worker.tune_attended` raises it.
    """
    with connected(fleet.address, fleet.gpus):
        tuning = FleetTuning(fleet, request, settings, log=log)
        with tuning.measuring() as first:
            name = first.environment.device_name
        tuning = replace(tuning, device_name=name)
        return tune_attended(
            request, database, file, settings, watch=watch, device_name=name, measuring=tuning.measuring,
            timing=tuning.timing,
        )  # fmt: skip
