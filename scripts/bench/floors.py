"""The least time that each step of a layer takes on a device, by its roofline; for the pages of benchmarks."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autotuner.measure.roofline import Roofline, Work


def measured_ceilings(known: Roofline, dtypes: Iterable[str], cache_dir: Path) -> Roofline:
    """Return ceilings of the CUDA device with products of some element types, measured where these are not known."""
    from autotuner.measure import Measurer

    lacking = known.lacking(dtypes)
    if not lacking:
        return known
    with Measurer(device_type="cuda", cache_dir=cache_dir) as measurer:
        return known.with_products(measurer.ceilings(lacking))


def with_floors(cases: Iterable[Mapping[str, Any]], ceilings: Roofline) -> list[dict[str, Any]]:
    """Return cases with what each of their steps takes at least, in microseconds, and each case's sums of that.

    The least is for the step's products, for the bytes that it reads and writes, and for the greater of both. A step
    that was measured to take less lowers the ceilings for all cases, as in a tuning: no floor is above its step.
    """
    rows = list(cases)
    lowered = ceilings.lowered((_work(row, step), step["predicted_us"]) for row in rows for step in row["steps"])
    return [_with_floors(row, lowered) for row in rows]


def _with_floors(row: Mapping[str, Any], ceilings: Roofline) -> dict[str, Any]:
    alone = {
        "compute_floor_us": Roofline(products=ceilings.products),
        "bytes_floor_us": Roofline(moved=ceilings.moved),
        "floor_us": ceilings,
    }
    steps = [
        step | {name: part.optimistic_us(_work(row, step)) for name, part in alone.items()} for step in row["steps"]
    ]
    sums = {name: sum(step[name] for step in steps) for name in alone}
    return {**row, **sums, "steps": steps}


def _work(row: Mapping[str, Any], step: Mapping[str, Any]) -> Work:
    return Work(step["counted_bytes"], {row["dtype"]: step["flop"]} if step["flop"] else {})
