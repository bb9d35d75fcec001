"""Routes of what is known: measurements, devices, models."""

from collections import defaultdict
from typing import Annotated

from fastapi import APIRouter, Query

from autotuner.database import Database, Filter, StoredMeasurement
from autotuner.ir.models import ModelFile
from autotuner.ir.records import STATUSES
from autotuner.server.http.documentation import refusals
from autotuner.server.http.paging import page_of
from autotuner.server.http.strict import StrictRoute
from autotuner.server.http.submissions import ModelFiles
from autotuner.server.wire.requests import MeasurementsQuery
from autotuner.server.wire.responses import (
    DeviceView,
    EnvironmentView,
    GpuView,
    MeasurementPage,
    MeasurementView,
    ModelView,
    StatisticsView,
    WorkerView,
)


def known_routes(database: Database, files: ModelFiles) -> APIRouter:
    routes = APIRouter(route_class=StrictRoute)

    @routes.get(
        "/v1/measurements",
        tags=["measurements"],
        operation_id="list_measurements",
        summary="List measurements",
        responses={200: {"description": "A page of measurements."}, **refusals()},
    )
    def measurements(query: Annotated[MeasurementsQuery, Query()]) -> MeasurementPage:
        """Return a page of measurements in the order of their ids; `next` of a page is `after` of the next one.

        Failures are measurements with a status. With `statistics=true`, all that the filters admit are counted.
        """
        where = Filter(
            environment_key=query.environment_key,
            device_type=query.device_type,
            signature=query.signature,
            kernel=query.kernel,
            kinds=None if query.kinds is None else query.kinds.split("+"),
            status=query.status,
        )

        def read(number: int, after: int | None) -> list[MeasurementView]:
            return [measurement_view(measured) for measured in database.measurements(where, limit=number, after=after)]

        items, after = page_of(read, query.limit, query.after)
        return MeasurementPage(
            items=items,
            next=after,
            statistics=StatisticsView.model_validate(database.statistics(where)) if query.statistics else None,
        )

    @routes.get(
        "/v1/devices",
        tags=["measurements"],
        operation_id="list_devices",
        summary="List devices",
        responses={200: {"description": "Every device."}, **refusals()},
    )
    def devices() -> list[DeviceView]:
        """Return the devices that somebody measured on, or for which a worker takes jobs now.

        `gpus` are those of fleets that jobs have asked for; of one that takes no part, `reason` says why.
        """
        workers, environments, gpus = defaultdict(list), defaultdict(list), defaultdict(list)
        for gpu in database.gpus.all():
            gpus[gpu.device_type, gpu.device_name].append(GpuView.model_validate(gpu))
        for worker in database.queue.workers():
            workers[worker.device_type, worker.device_name].append(WorkerView.model_validate(worker))
        counted = database.inventory.measurements()
        for environment in database.environments():
            environments[environment.device_type, environment.device_name].append(
                EnvironmentView(
                    key=environment.key,
                    facts=dict(environment.facts),
                    policy=dict(environment.policy),
                    measurements=counted.get(environment.key, dict.fromkeys(STATUSES, 0)),
                )
            )
        return [
            DeviceView(
                type=kind,
                name=name,
                workers=workers[kind, name],
                environments=environments[kind, name],
                gpus=gpus[kind, name],
            )
            for kind, name in sorted({*workers, *environments, *gpus})
        ]

    @routes.get(
        "/v1/models",
        tags=["measurements"],
        operation_id="list_models",
        summary="List models",
        responses={200: {"description": "Every model of the service."}, **refusals()},
    )
    def models() -> list[ModelView]:
        """Return the model files of the service: their axes, presets and options."""
        return [model_view(name, files.file(name)) for name in files.names()]

    return routes


def measurement_view(found: StoredMeasurement) -> MeasurementView:
    subgraph, candidate, measurement = found.call.subgraph, found.call.candidate, found.measurement
    names = ("status", "median_us", "low_us", "high_us", "workspace_bytes", "message")
    return MeasurementView(
        **{name: getattr(measurement, name) for name in names},
        id=found.id,
        environment_key=found.environment_key,
        call_key=found.call.key,
        signature=subgraph.signature,
        kinds=list(subgraph.kinds),
        kernel=candidate.kernel,
        forms=list(candidate.forms),
        params=dict(candidate.params),
        extents=[list(tensor.extents) for tensor in subgraph.tensors],
        samples=len(measurement.samples_us),
        marks=list(measurement.marks),
        measured_at=found.measured_at,
    )


def model_view(name: str, file: ModelFile) -> ModelView:
    found = file.definition.model_dump(include={"dtype", "axes", "presets"})
    options = {option: value.model_dump(exclude_none=True) for option, value in file.definition.options.items()}
    return ModelView(name=name, options=options, **found)
