"""Why a configuration does not cover a call."""

from dataclasses import dataclass


class TunedWarning(UserWarning):
    """A tuned module ran otherwise than its configuration says; the message says why."""


@dataclass(frozen=True)
class Reason:
    """A key to count by, and a sentence."""

    key: str
    sentence: str
