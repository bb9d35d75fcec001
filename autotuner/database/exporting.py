"""Results files: the measurements of an environment as JSON in the format of the autotuning community (T4 1.0.0).

Kernel Tuner writes its results in it. A result has the parameters of a candidate under `configuration`; times are in
milliseconds, as Kernel Tuner writes them, and in microseconds, as they are stored, under `measurements`.
Format: https://github.com/odgaard/TuningSchema (branch T4).
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from autotuner.database.values import EVERY, Filter, StoredMeasurement
from autotuner.ir.records import Environment, Status

SCHEMA_VERSION = "1.0.0"
PAGE = 1000
PACKAGES = ("torch", "triton")
INVALIDITY: Mapping[Status, str] = {
    "ok": "correct",
    "refused": "constraints",
    "wrong": "correctness",
    "error": "runtime",
    "timeout": "timeout",
    "crashed": "runtime",
    "out_of_memory": "runtime",
}


class Pages(Protocol):
    """The measurements of a database, page after page."""

    def measurements(
        self, where: Filter = EVERY, *, limit: int | None = None, after: int | None = None
    ) -> list[StoredMeasurement]: ...


def results_file(database: Pages, environment: Environment) -> Iterator[str]:
    """Yield the text of the file in parts; a page of measurements is in memory at a time."""
    head = json.dumps({"schema_version": SCHEMA_VERSION, "metadata": metadata(environment)}, indent=1)
    yield head.removesuffix("\n}") + ',\n "results": ['
    after, separator = 0, "\n"
    while page := database.measurements(Filter(environment.key), limit=PAGE, after=after):
        for found in page:
            yield separator + json.dumps(result(found))
            separator = ",\n"
        after = page[-1].id
    yield "\n ]\n}\n"


def metadata(environment: Environment) -> dict[str, Any]:
    """Return where the measurements were made."""
    facts = dict(environment.facts)
    return {
        "hardware": {"hardware_description": [{"type": environment.device_type, "name": environment.device_name}]},
        "environment": {
            "device_query": {"key": environment.key, **environment.to_json()},
            "requirements": [f"{name}=={facts[name]}" for name in PACKAGES if name in facts],
        },
    }


def result(found: StoredMeasurement) -> dict[str, Any]:
    """Return one measurement."""
    subgraph, candidate, measurement = found.call.subgraph, found.call.candidate, found.measurement
    values = [
        ("median", measurement.median_us, "us"), ("low", measurement.low_us, "us"), ("high", measurement.high_us, "us"),
        ("samples", list(measurement.samples_us) or None, "us"), ("workspace", measurement.workspace_bytes, "bytes"),
        ("status", measurement.status, ""), ("message", measurement.message or None, ""),
        ("marks", list(measurement.marks) or None, ""), ("call_key", found.call.key, ""),
    ]  # fmt: skip
    times_us = measurement.samples_us or (() if measurement.median_us is None else (measurement.median_us,))
    best_us = measurement.median_us
    return {
        "timestamp": found.measured_at.isoformat(),
        "configuration": {
            "operator": "+".join(subgraph.kinds), "signature": subgraph.signature,
            "extents": [list(tensor.extents) for tensor in subgraph.tensors],
            "dtypes": [tensor.dtype for tensor in subgraph.tensors], "kernel": candidate.kernel,
            "kernel_version": candidate.version, "forms": list(candidate.forms), **dict(candidate.params),
        },
        "times": {"runtimes": [us / 1e3 for us in times_us]},
        "invalidity": INVALIDITY[measurement.status],
        "correctness": 1 if measurement.status == "ok" else 0,
        "measurements": [
            *([] if best_us is None else [{"name": "time", "value": best_us / 1e3, "unit": "ms"}]),
            *({"name": name, "value": value, "unit": unit} for name, value, unit in values if value is not None),
        ],
        "objectives": ["time"],
    }  # fmt: skip
