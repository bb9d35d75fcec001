"""Ceilings of a device for people, from the facts that were measured of it."""

from collections.abc import Mapping
from typing import Any

from autotuner.measure.roofline import Roofline
from autotuner.plan.report.picture import Ceilings


def ceilings_of(facts: Mapping[str, Any]) -> Ceilings:
    """Return the best rates of a device.

    Args:
        facts: of an environment, as a database has them; {} where none were measured.
    """
    roofline = Roofline.from_facts(facts)
    moved = max((amount / us for amount, us in roofline.moved.rungs), default=None)  # bytes per us: MB/s
    products = {
        dtype: max(amount / us for amount, us in ladder.rungs) / 1e6
        for dtype, ladder in roofline.products.items()
        if ladder.rungs
    }
    return Ceilings(None if moved is None else moved / 1e3, products)
