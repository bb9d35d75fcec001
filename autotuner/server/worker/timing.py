"""Timing end to end in a process of its own, so that it ends when its job does, whatever it is doing."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from autotuner import errors
from autotuner.checkpoint import checkpoint
from autotuner.errors import AutotunerError, MeasureError, stacklevel
from autotuner.measure import lock_path, locked
from autotuner.measure.child import die_with
from autotuner.measure.lock import Waiting
from autotuner.plan.configuration import Configuration

POLL_S = 0.5
_PROGRAM = (
    "import json, sys; pipe, parent, path = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from autotuner.server.worker.timing import main; main(pipe, parent)"
)


def time_apart(
    configuration: Configuration,
    samples: int,
    threads: int | None = None,
    waiting: Waiting = lambda _waited_s, _words: None,
) -> Configuration:
    """Measure a configuration's whole plan in another process, and return it with what was found.

    Its overlap is chosen, as by `autotuner.runtime.with_measured_overlap`; then it is timed against its peers, if it
    has any, as by `autotuner.runtime.time_peers`.

    The process holds the device's lock meanwhile. It is killed where the work is not to go on.

    Args:
        samples: turns of each peer; 0 for a model that has none.
        waiting: told while the lock is waited for, as by `locked`.

    Raises:
        ConfigurationError: the framework has no layer for the configuration's model.
        MeasureError: the process was lost, or what it ran failed.
    """
    ours, theirs = Pipe()
    with tempfile.TemporaryFile() as log:
        start = json.dumps([theirs.fileno(), os.getpid(), sys.path])
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, start], pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        try:
            request = {"configuration": configuration.to_json(), "samples": samples, "threads": threads}
            ours.send_bytes(json.dumps(request).encode())
            answer: dict[str, Any] = {}
            while not answer or "waited_s" in answer:
                if answer:
                    waiting(answer["waited_s"], answer["words"])
                while not ours.poll(POLL_S):
                    checkpoint()
                answer = json.loads(ours.recv_bytes())
        except (EOFError, OSError):
            log.seek(0)
            words = log.read().decode(errors="replace").strip().splitlines()[-1:]
            raise MeasureError(f"the process that times end to end was lost: {' '.join(words) or 'killed'}") from None
        finally:
            ours.close()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return _answered(answer)


def _answered(answer: dict[str, Any]) -> Configuration:
    from autotuner.runtime import TunedWarning

    for message in answer["warnings"]:
        warnings.warn(message, TunedWarning, stacklevel=stacklevel())
    if "error" in answer:
        kind = getattr(errors, answer["error"], MeasureError)
        raise kind(answer["message"])
    return Configuration.from_json(answer["configuration"])


def main(pipe: int, parent: int) -> None:
    """Answer the one request that comes through an inherited pipe of the process with number `parent`."""
    die_with(parent)
    connection = Connection(pipe)
    request = json.loads(connection.recv_bytes())
    configuration = Configuration.from_json(request["configuration"])

    def waiting(waited_s: float, words: str) -> None:
        connection.send_bytes(json.dumps({"waited_s": waited_s, "words": words}).encode())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = _timed(configuration, request["samples"], request["threads"], waiting)
    from autotuner.runtime import TunedWarning

    told = [str(warning.message) for warning in caught if issubclass(warning.category, TunedWarning)]
    connection.send_bytes(json.dumps(answer | {"warnings": told}).encode())


def _timed(configuration: Configuration, samples: int, threads: int | None, waiting: Waiting) -> dict[str, Any]:
    from autotuner.runtime import time_peers, with_measured_overlap

    try:
        with locked(lock_path(configuration.environment["device_type"]), alone=True, waiting=waiting):
            chosen = with_measured_overlap(configuration)
            if samples:
                chosen = chosen.with_measured(time_peers(chosen, samples, threads=threads))
            return {"configuration": chosen.to_json()}
    except AutotunerError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except Exception as error:
        return {"error": "MeasureError", "message": f"timing end to end failed: {type(error).__name__}: {error}"}
