"""Processes that a supervisor keeps alive, as systemd or Kubernetes would, and everything that they have started."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

PAUSE_S = 1.0


class Supervised:
    """A command that is started anew a moment after it has ended; leaving the context ends it with all it has started.

    Args:
        log: where its output goes.
        pause_s: between an end and the next start.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, pause_s: float = PAUSE_S
    ) -> None:
        self._command, self._environment, self._log = list(command), dict(environment), log
        self._pause_s = pause_s
        self._over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self.kill()
        self._thread.join()

    @property
    def process_id(self) -> int | None:
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def kill(self) -> None:
        """Kill it and all that it has started, at once."""
        for number in reversed(self.family()):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)

    def family(self) -> list[int]:
        """Return its process and all that come from it."""
        return [] if self.process_id is None else descendants(self.process_id)

    def _keep(self) -> None:
        while not self._over.is_set():
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
            self.starts += 1
            self._process.wait()
            self._over.wait(self._pause_s)


def descendants(number: int) -> list[int]:
    """Return a process and all that come from it, parents first."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found = [number]
    for each in found:
        found += children.get(each, [])
    return found


def titled(title: str) -> list[int]:
    """Return the processes that come from this one and whose title begins so, the youngest last."""
    found = []
    for number in descendants(os.getpid()):
        with suppress(OSError):
            if Path(f"/proc/{number}/cmdline").read_bytes().startswith(title.encode()):
                found.append(number)
    return sorted(found)


def frozen_for(numbers: Sequence[int], seconds: float) -> None:
    """Stop processes, and let them go on after a while."""
    for number in numbers:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGSTOP)
    time.sleep(seconds)
    for number in reversed(numbers):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGCONT)
