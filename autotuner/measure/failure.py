"""Failures of calls, each as a status and a sentence."""

from autotuner.errors import KernelError
from autotuner.ir.records import Measurement, Status

MESSAGE_CHARACTERS = 600


class RefusalError(Exception):
    """A sentence on why a call cannot run, or cannot be timed as the policy asks."""


class WrongError(Exception):
    """A sentence on what is wrong with a kernel's results."""


class ContextLostError(Exception):
    """The device can no longer be used from this process; its end is left to whoever runs it."""


def failure(error: BaseException) -> Measurement:
    """Return what an exception says about a call."""
    text = str(error)[:MESSAGE_CHARACTERS]
    lowered = text.lower()
    status: Status = "error"
    message = f"{type(error).__name__}: {text}"
    if isinstance(error, RefusalError | KernelError | WrongError):
        status, message = ("wrong" if isinstance(error, WrongError) else "refused"), text
    elif isinstance(error, MemoryError) or any(
        words in lowered for words in ("out of memory", "can't allocate memory", "bad_alloc", "cannot allocate memory")
    ):
        status = "out_of_memory"
    return Measurement(status, message=message)
