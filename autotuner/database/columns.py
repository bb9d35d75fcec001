"""Columns: how values are written into rows, and made again from them."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Row

from autotuner.database.job import Job, JobState
from autotuner.database.owner import is_gone
from autotuner.database.tables import EnvironmentRow, JobRow, MeasurementRow
from autotuner.ir.records import Call, Environment, Measurement

ENVIRONMENT = (EnvironmentRow.device_type, EnvironmentRow.device_name, EnvironmentRow.facts, EnvironmentRow.policy)
MEASUREMENT = (
    MeasurementRow.status,
    MeasurementRow.median_us,
    MeasurementRow.low_us,
    MeasurementRow.high_us,
    MeasurementRow.samples_us,
    MeasurementRow.workspace_bytes,
    MeasurementRow.message,
    MeasurementRow.marks,
)
JOB = (
    JobRow.id,
    JobRow.model,
    JobRow.request,
    JobRow.device_type,
    JobRow.device_name,
    JobRow.attended,
    JobRow.state,
    JobRow.cancelling,
    JobRow.worker,
    JobRow.lease_until,
    JobRow.progress,
    JobRow.revision,
    JobRow.counts,
    JobRow.configuration_id,
    JobRow.created_at,
    JobRow.started_at,
    JobRow.finished_at,
    JobRow.message,
)


def call_columns(call: Call) -> dict[str, Any]:
    return {
        "call_key": call.key,
        "signature": call.subgraph.signature,
        "kernel": call.candidate.kernel,
        "kinds": joined(call.subgraph.kinds),
        "call": call.to_json(),
    }


def measurement_columns(measurement: Measurement) -> dict[str, Any]:
    return {**measurement.to_json(), "message": storable(measurement.message)}


def measurement_of(row: Row[*tuple[Any, ...]]) -> Measurement:
    """Return the measurement in a row that has the columns `MEASUREMENT`, and perhaps others."""
    return Measurement(
        row.status,
        row.median_us,
        row.low_us,
        row.high_us,
        tuple(row.samples_us),
        row.workspace_bytes,
        row.message,
        tuple(row.marks),
    )


def environment_of(row: Row[*tuple[Any, ...]]) -> Environment:
    """Return the environment in a row that has the columns `ENVIRONMENT`; it has the key that it was stored with."""
    return Environment(row.device_type, row.device_name, tuple(row.facts.items()), tuple(row.policy.items()))


def job_of(row: Row[*tuple[Any, ...]]) -> Job:
    """Return the job in a row that has the columns `JOB`, and whether its worker lives as far as can be told here."""
    values = dict(row._mapping)
    del values["lease_until"]
    return Job(**values, is_lost=is_lost(row))


def is_lost(row: Row[*tuple[Any, ...]]) -> bool:
    """Say whether the job in a row runs by its state, and whoever ran it is gone."""
    return row.state == "running" and is_gone(row.worker, row.lease_until, datetime.now(UTC))


def ending(state: JobState, message: str) -> dict[str, Any]:
    """Return what changes in a job that ends now."""
    return {
        "state": state,
        "cancelling": False,
        "finished_at": datetime.now(UTC),
        "message": storable(message),
        "lease_until": None,
        "revision": JobRow.revision + 1,
    }


def joined(kinds: Sequence[str]) -> str:
    return "+".join(kinds)


def storable(message: str) -> str:
    """Return a message as any database can keep it: a failure's own words never stop it from being stored."""
    return message.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")
