"""Every error that the product raises on purpose, as one tree.

A message says what was given and what would be valid. `exit_code` is what the command line ends with.
"""

import sys
from pathlib import Path
from traceback import walk_tb

_OWN = ("autotuner", "torch", "contextlib", "functools")
"""Packages and modules that stand between the user's code and a warning."""


class AutotunerError(Exception):
    """Base of every error raised on purpose."""

    exit_code = 1


class TunedWarning(UserWarning):
    """A tuned module ran otherwise than its configuration says; the message says why."""


class InputError(AutotunerError):
    """Something that the user gave is not valid."""

    exit_code = 2


class LayoutError(InputError):
    """A text that is no layout or no form, or a form that does not fit its tensor."""


class GraphError(InputError):
    """An operator, spec or graph that contradicts itself."""


class ModelError(InputError):
    """A model file, preset, extent or option that cannot be used."""


class SpaceError(InputError):
    """A search space file that cannot be used, or a space that is too large."""


class KernelError(InputError):
    """A kernel name that is taken or unknown."""


class ProblemError(InputError):
    """A problem that contradicts itself."""


class SettingsError(InputError):
    """An environment variable with a value that cannot be used."""


class ConfigurationError(InputError):
    """A configuration that is corrupt, of another schema version, or of another graph."""


class NotFoundError(InputError):
    """A job, configuration or other thing that is asked for by its name, and is not there."""


class JobStateError(InputError):
    """Something that a job cannot do in the state that it is in."""


class KeyReusedError(InputError):
    """An idempotency key under which something else was asked for before."""


class LockHeldError(InputError):
    """A lock of a database that another holds."""


class PeerLostError(AutotunerError):
    """Another process that trains the same model has ended, or does not answer."""


class MissingError(AutotunerError, ImportError):
    """A package that an extra of this one installs, and that is not there."""

    exit_code = 10


class DeviceError(AutotunerError):
    """A device that is asked for and is not here."""

    exit_code = 3


class DatabaseError(AutotunerError):
    """A database that cannot be opened, read, written or migrated."""

    exit_code = 4


class UnavailableError(DatabaseError):
    """A database that is away at the moment, or there but `locked` for what is asked: asked later, it may answer."""

    def __init__(self, message: str, *, locked: bool = False) -> None:
        super().__init__(message)
        self.locked = locked


class InfeasibleError(AutotunerError):
    """No assignment satisfies every factor of a problem."""

    exit_code = 5


class BudgetError(InfeasibleError):
    """Assignments exist, but each needs more bytes than the budget; `least_bytes` is what suffices for one.

    Args:
        is_proven: False where none that fits was found in time, and there may be one.
    """

    def __init__(self, message: str, least_bytes: int, *, is_proven: bool = True) -> None:
        super().__init__(message)
        self.least_bytes, self.is_proven = least_bytes, is_proven


class MeasureError(AutotunerError):
    """The measuring process could not be started or kept alive."""

    exit_code = 6


class CheckError(AutotunerError):
    """A configuration ran, and its results are not those of the framework."""

    exit_code = 7


class ServiceError(AutotunerError):
    """The service cannot be reached, or it failed; `passing` where the same question may be answered later."""

    exit_code = 8

    def __init__(self, message: str, *, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing


class ClusterTokenError(AutotunerError):
    """The token of a cluster: this host has none, cannot read it, or has another one. Trying again changes nothing."""

    exit_code = 9


def stacklevel() -> int:
    """Return the `stacklevel` with which a warning points at the first frame outside this package and torch.

    Call it in the call of `warnings.warn` itself: `warnings.warn(message, stacklevel=stacklevel())`. Where every frame
    is inside, the outermost one is pointed at. (From Python 3.12 on, `skip_file_prefixes` does the same.)
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_own(str(frame.f_globals.get("__name__", ""))):
        frame = frame.f_back
        code = frame.f_code.co_filename
        level += not ("importlib" in code and "_bootstrap" in code)  # warnings count no frames of the import system
    return level


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its class where it says nothing.

    CUDA's errors add advice in further lines.

    >>> first_line(ValueError("no such layer\\nmore")), first_line(KeyError())
    ('no such layer', 'KeyError')
    """
    return str(error).strip().partition("\n")[0] or type(error).__name__


def first_cause(error: BaseException) -> str:
    """Return what the first error said that led to this one, and from which line outside this package and torch.

    What fails while a CUDA graph is captured fails once more where the capture ends, and says nothing new there.
    """
    while (earlier := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = earlier
    places = [
        f"{Path(frame.f_code.co_filename).name}, line {line}"
        for frame, line in walk_tb(error.__traceback__)
        if not _is_own(str(frame.f_globals.get("__name__", ""))) and "torchinductor" not in frame.f_code.co_filename
    ]
    return f"{first_line(error)}; {places[-1]}" if places else first_line(error)


def _is_own(module: str) -> bool:
    return module.partition(".")[0] in _OWN
