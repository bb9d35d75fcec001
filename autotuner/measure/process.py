"""The parent's side of the measuring process: start it, talk to it, notice its death, end it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from autotuner.checkpoint import checkpoint
from autotuner.errors import MeasureError
from autotuner.ir.records import Measurement, Status
from autotuner.measure.child import NOBODY, PULSE, Pulse
from autotuner.measure.lock import Waiting

START_S = 180.0
STOP_S = 5.0
POLL_S = 0.5
LOG_CHARACTERS = 300
_PROGRAM = (
    "import json, sys; pipe, pulse, parent, path = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from autotuner.measure.child import main; main(pipe, pulse, parent)"
)


class Meanwhile(Protocol):
    """Something that others say, to be heard while a child is waited for."""

    @property
    def connections(self) -> list[Connection]:
        """Connections that are ready when there is something to hear."""

    def turn(self) -> None:
        """Hear what was said, or note that it is late."""


class DiedError(Exception):
    """The child is gone. `index` is the place of the call that it worked on, -1 if it was on none."""

    def __init__(self, index: int, measurement: Measurement) -> None:
        super().__init__(measurement.message)
        self.index, self.measurement = index, measurement


class Child:
    """One measuring process: a fresh interpreter, leader of its own session and process group.

    Args:
        start: what it needs to know first.
        waiting: told for how long it has waited for the device, and who holds that.
    """

    def __init__(self, start: Mapping[str, Any], waiting: Waiting = lambda _waited_s, _words: None) -> None:
        self._waiting = waiting
        self.connection, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._oom_kills = oom_kills()
        with tempfile.TemporaryFile() as shared:
            shared.write(PULSE.pack(NOBODY, monotonic(), inf))
            shared.flush()
            self.pulse = Pulse(shared.fileno())
            files = (theirs.fileno(), shared.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps([*files, os.getpid(), sys.path])],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )
        theirs.close()
        self.pulse.write(NOBODY, START_S)
        self.send(start)

    @property
    def process_id(self) -> int:
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a request.

        Raises:
            DiedError: the child is gone.
        """
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            raise self._died() from None

    def receive(self, meanwhile: "Meanwhile | None" = None) -> dict[str, Any]:
        """Wait for an answer, for as long as what the child works on may take.

        Args:
            meanwhile: what has a turn when it has something to say, and every `POLL_S`.

        Raises:
            DiedError: the child is gone, or was killed because it took too long.
        """
        while True:
            checkpoint()
            others = [] if meanwhile is None else meanwhile.connections
            ready = wait([self.connection, *others], min(POLL_S, max(0.0, self.deadline() - monotonic())))
            if meanwhile is not None:
                meanwhile.turn()
            if self.connection in ready:
                try:
                    answer: dict[str, Any] = json.loads(self.connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    raise self._died() from None
                if "waited_s" not in answer:
                    return answer
                self._waiting(answer["waited_s"], answer["words"])
                continue
            if self.deadline() <= monotonic():
                raise self.overdue()

    def deadline(self) -> float:
        """Return the monotonic time at which what the child works on has taken too long."""
        _, began, allowance_s = self.pulse.read()
        return began + allowance_s

    def overdue(self) -> DiedError:
        """Kill the child for taking too long, and return what that says about its call."""
        index, _, allowance_s = self.pulse.read()
        self.kill()
        return DiedError(index, Measurement("timeout", message=f"no result after {allowance_s:g} s"))

    def kill(self) -> None:
        """Kill the child and whatever it has started, at once."""
        self.signal()
        self._process.wait()
        self.connection.close()

    def signal(self) -> None:
        """Have the child, and whatever it has started, killed; `kill` waits until it is gone."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def started(self) -> None:
        """Wait until the child has imported what it needs.

        Raises:
            MeasureError: it could not.
        """
        try:
            self.receive()
        except DiedError as error:
            raise MeasureError(f"the measuring process did not start: {error}") from None

    def _died(self) -> DiedError:
        index, _, _ = self.pulse.read()
        try:
            code = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        status: Status = "crashed"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL and oom_kills() > self._oom_kills:
                status, how = "out_of_memory", "killed by the system, which ran out of memory"
        else:
            how = "its pipe closed while it went on" if code is None else f"exited with code {code}"
        last = self._last_words()
        return DiedError(index, Measurement(status, message=f"the process was lost: {how}{last and f' ({last})'}"))

    def _last_words(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 4 * LOG_CHARACTERS))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:LOG_CHARACTERS] if lines else ""


def oom_kills() -> int:
    """Return how many processes the system has killed for memory since it started; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
