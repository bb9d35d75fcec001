"""Timing end to end in a process of its own, so that it ends when its job does, whatever it is doing."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from contextlib import closing, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from autotuner import errors
from autotuner.checkpoint import checkpoint
from autotuner.errors import AutotunerError, MeasureError, stacklevel
from autotuner.ir.models import Model
from autotuner.measure import lock_path, locked
from autotuner.measure.child import die_with
from autotuner.measure.lock import Waiting
from autotuner.plan.configuration import Configuration

if TYPE_CHECKING:
    from autotuner.runtime import ReadyPeers

POLL_S = 0.5
SETTLED_SHARE = 0.005
"""Half of a median's interval over it, of the plan and its peers, at which fewer turns than those asked for do."""
_PROGRAM = (
    "import json, sys; pipe, parent, path, compiles = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from autotuner.server.worker.timing import main; main(pipe, parent, compiles=compiles)"
)


class TimingProcess:
    """A process that times one plan end to end, and may get ready before there is a plan.

    It imports torch as it starts. It ends with the thread that started it, and is killed by `close`.

    Args:
        compiles: it will have peers to compile, and imports what that takes as well.
    """

    def __init__(self, *, compiles: bool = False) -> None:
        self._connection, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._gets_ready = False
        start = json.dumps([theirs.fileno(), os.getpid(), sys.path, compiles])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, start], pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL,
            stdout=self._log, stderr=self._log, start_new_session=True,
        )  # fmt: skip
        theirs.close()

    def get_ready(self, model: Model, device_type: str, samples: int, threads: int | None) -> None:
        """Have it build the peers of a model's plans, if nobody else holds the device; this does not wait for it.

        Nothing may be timed on the device meanwhile.

        Args:
            samples: as for `time_apart`, as is `threads`.
        """
        about = {"model": model.to_json(), "device_type": device_type, "samples": samples, "threads": threads}
        with suppress(OSError):  # it is gone, and `is_ready` says so
            self._connection.send_bytes(json.dumps(about).encode())
        self._gets_ready = True

    def is_ready(self) -> bool:
        """Wait until it is ready, where it was asked to get so; return False if it was lost."""
        if self._gets_ready:
            self._gets_ready = False
            try:
                self._heard()
            except (EOFError, OSError):
                return False
        return self._process.poll() is None

    def timed(self, configuration: Configuration, samples: int, threads: int | None, waiting: Waiting) -> Configuration:
        """Return a configuration with what its whole plan took. Arguments and errors as those of `time_apart`."""
        request = {"configuration": configuration.to_json(), "samples": samples, "threads": threads}
        try:
            self._connection.send_bytes(json.dumps(request).encode())
            while "waited_s" in (answer := self._heard()):
                waiting(answer["waited_s"], answer["words"])
        except (EOFError, OSError):
            self._log.seek(0)
            words = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
            raise MeasureError(f"the process that times end to end was lost: {' '.join(words) or 'killed'}") from None
        return _answered(answer)

    def _heard(self) -> dict[str, Any]:
        while not self._connection.poll(POLL_S):
            checkpoint()
        answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        return answer

    def close(self) -> None:
        """Kill it, with whatever it has started."""
        self._connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def time_apart(
    configuration: Configuration,
    samples: int,
    threads: int | None = None,
    waiting: Waiting = lambda _waited_s, _words: None,
    started: TimingProcess | None = None,
) -> Configuration:
    """Measure a configuration's whole plan in another process, and return it with what was found.

    Its overlap is chosen, as by `autotuner.runtime.with_measured_overlap`; then it is timed against its peers, as by
    `autotuner.runtime.time_peers`. Where that fails for a model that the framework has no layer for, such as one whose
    values cannot be made up, it is returned untimed, with a warning.

    The process holds the device's lock meanwhile. It is killed where the work is not to go on.

    Args:
        samples: turns of each side, at most; 0 for a plan that is not timed.
        waiting: told while the lock is waited for, as by `locked`.
        started: a process that was started for it before; another takes its place where that was lost.

    Raises:
        MeasureError: the process was lost, or what it ran failed.
    """
    if started is not None and started.is_ready():
        return started.timed(configuration, samples, threads, waiting)
    with closing(TimingProcess()) as process:
        return process.timed(configuration, samples, threads, waiting)


def _answered(answer: dict[str, Any]) -> Configuration:
    from autotuner.runtime import TunedWarning

    for message in answer["warnings"]:
        warnings.warn(message, TunedWarning, stacklevel=stacklevel())
    if "error" in answer:
        kind = getattr(errors, answer["error"], MeasureError)
        raise kind(answer["message"])
    return Configuration.from_json(answer["configuration"])


def main(pipe: int, parent: int, *, compiles: bool = False) -> None:
    """Answer the one plan that comes through an inherited pipe of the process with number `parent`.

    A model that comes before it says which peers to build meanwhile. Where that fails, this process ends.
    """
    die_with(parent)
    from autotuner.runtime import TunedWarning

    if compiles:
        with suppress(ImportError):  # a peer that cannot be compiled is left out with its reason
            import torch._dynamo
            import torch._inductor.compile_fx  # noqa: F401

    connection = Connection(pipe)
    ready = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while "configuration" not in (request := json.loads(connection.recv_bytes())):
            ready = _made_ready(request)
            connection.send_bytes(json.dumps({"ready": True}).encode())

        def waiting(waited_s: float, words: str) -> None:
            connection.send_bytes(json.dumps({"waited_s": waited_s, "words": words}).encode())

        configuration = Configuration.from_json(request["configuration"])
        answer = _timed(configuration, request["samples"], request["threads"], waiting, ready)
    told = [str(warning.message) for warning in caught if issubclass(warning.category, TunedWarning)]
    connection.send_bytes(json.dumps(answer | {"warnings": told}).encode())


class _BusyError(Exception):
    """Somebody else holds the device."""


def _made_ready(request: dict[str, Any]) -> "ReadyPeers | None":
    """Return the peers of a model, or None where it has none, or the device is not free for them."""
    from autotuner.runtime import ready_peers

    def busy(_waited_s: float, _words: str) -> None:
        raise _BusyError

    if not request["samples"]:
        return None
    try:
        with locked(lock_path(request["device_type"]), alone=True, waiting=busy):
            return ready_peers(Model.from_json(request["model"]), request["device_type"], request["threads"])
    except _BusyError:
        return None


def _timed(
    configuration: Configuration,
    samples: int,
    threads: int | None,
    waiting: Waiting,
    ready: "ReadyPeers | None" = None,
) -> dict[str, Any]:
    from autotuner.runtime import TunedWarning, time_peers, with_measured_overlap

    try:
        with locked(lock_path(configuration.environment["device_type"]), alone=True, waiting=waiting):
            chosen = with_measured_overlap(configuration)
            if samples:
                try:
                    found = time_peers(chosen, samples, threads=threads, ready=ready, settled_share=SETTLED_SHARE)
                    chosen = chosen.with_measured(found)
                except Exception as error:
                    if chosen.model.has_framework_layer:
                        raise
                    words = f"{chosen.model.reference} was not timed end to end: {error}"
                    warnings.warn(words, TunedWarning, stacklevel=1)
            return {"configuration": chosen.to_json()}
    except AutotunerError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except Exception as error:
        return {"error": "MeasureError", "message": f"timing end to end failed: {type(error).__name__}: {error}"}
