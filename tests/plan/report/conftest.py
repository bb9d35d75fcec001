"""Fixtures for tests of the report: a small model, and what was recorded of an encoder layer with its configuration."""

import pytest

from autotuner.plan.configuration import Configuration
from autotuner.plan.parts import Measured
from autotuner.tuner import build_configuration
from tests.tuner.conftest import Recorded, recorded, small

__all__ = ["encoder", "recorded", "small"]


@pytest.fixture(scope="module")
def encoder(recorded: Recorded) -> Configuration:
    """Return the configuration of the recorded encoder layer, with an end-to-end timing made up."""
    counts = {"calls": len(recorded.space.calls), "measured": len(recorded.measurements), "failed": 0}
    found = build_configuration(recorded.model, recorded.space, recorded.measurements, recorded.environment, counts)
    return found.with_measured(Measured(1610.0, 120.0, {"eager": 3220.0, "torch.compile": 3300.0}, 30))
