"""Views: from values of the database to the bodies that travel."""

from collections.abc import Mapping
from typing import Any

from autotuner.database import Job, Statistics, StoredMeasurement, Worker
from autotuner.ir.models import Model, ModelFile
from autotuner.server.wire import (
    JobView,
    MeasurementView,
    ModelView,
    ProgressView,
    StatisticsView,
    SubmittedLimits,
    WorkerView,
)


def job_view(job: Job) -> JobView:
    request = job.request
    model = Model(**request["model"])  # checked when it was stored
    return JobView(
        id=job.id,
        state=job.state,
        cancelling=job.cancelling,
        attended=job.attended,
        model=job.model,
        family=model.family,
        extents=dict(model.extents),
        options=dict(model.options),
        dtype=model.dtype,
        device_type=job.device_type,
        device_name=job.device_name,
        gap=request["gap"],
        estimated_gap=request.get("estimated_gap"),
        budget_bytes=request.get("budget_bytes"),
        exhaustive=request.get("exhaustive", False),
        limits=SubmittedLimits.model_construct(**request["limits"]),
        worker=job.worker,
        progress=ProgressView(**job.progress) if job.progress else None,
        counts=dict(job.counts),
        configuration_id=job.configuration_id,
        created_at=job.created_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        message=job.message,
        revision=job.revision,
        stalled=_stalled(job),
    )


def _stalled(job: Job) -> str:
    if not job.is_lost:
        return ""
    if job.attended:
        return "the process that ran it is gone; what it measured is kept, the same command goes on from there"
    if job.cancelling:
        return "its worker is gone; it ends as cancelled as soon as another one comes"
    return f"its worker is gone; the next one for {job.device_name or job.device_type} goes on from what was measured"


def measurement_view(found: StoredMeasurement) -> MeasurementView:
    subgraph, candidate, measurement = found.call.subgraph, found.call.candidate, found.measurement
    return MeasurementView(
        id=found.id,
        environment_key=found.environment_key,
        call_key=found.call.key,
        signature=subgraph.signature,
        kinds=list(subgraph.kinds),
        kernel=candidate.kernel,
        forms=list(candidate.forms),
        params=dict(candidate.params),
        extents=[list(tensor.extents) for tensor in subgraph.tensors],
        status=measurement.status,
        median_us=measurement.median_us,
        low_us=measurement.low_us,
        high_us=measurement.high_us,
        samples=len(measurement.samples_us),
        workspace_bytes=measurement.workspace_bytes,
        message=measurement.message,
        marks=list(measurement.marks),
        measured_at=found.measured_at,
    )


def statistics_view(found: Statistics) -> StatisticsView:
    return StatisticsView(
        statuses=dict(found.statuses), least_us=found.least_us, mean_us=found.mean_us, greatest_us=found.greatest_us
    )


def worker_view(worker: Worker) -> WorkerView:
    return WorkerView(name=worker.name, started_at=worker.started_at, seen_at=worker.seen_at)


def model_view(name: str, file: ModelFile) -> ModelView:
    definition = file.definition
    options: Mapping[str, Any] = {
        option: value.model_dump(exclude_none=True) for option, value in definition.options.items()
    }
    return ModelView(
        name=name,
        dtype=definition.dtype,
        axes=dict(definition.axes),
        presets={preset: dict(extents) for preset, extents in definition.presets.items()},
        options=dict(options),
    )
