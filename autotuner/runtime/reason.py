"""Why a configuration does not cover a call."""

from dataclasses import dataclass

from autotuner.errors import TunedWarning

__all__ = ["Reason", "TunedWarning"]


@dataclass(frozen=True)
class Reason:
    """A key to count by, and a sentence."""

    key: str
    sentence: str
