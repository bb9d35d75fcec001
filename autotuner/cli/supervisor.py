"""A process that is kept alive beside this one: started anew when it dies, and ended with it."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Self

PR_SET_PDEATHSIG = 1
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
STEADY_S = 60.0
"""A process that lived so long has not failed at its start: the next pause is a short one again."""

GRACE_S = 5.0


class Supervisor:
    """Keeps a command running for the time of a `with` block; a thread of its own starts it anew when it ends.

    At the end of the block the process gets SIGTERM, and SIGKILL if it is still there 5 s later. A process that calls
    `end_with` for this one dies even where this one is killed. It is in a session of its own, so that Ctrl-C reaches
    only who supervises it.

    Args:
        command: its output goes where this process's goes.
        tell: called with an event and facts whenever the process has died.
        first_pause_s: before the first new start; it doubles with each that follows, up to a minute.
        inherited: file descriptors that the process has as well.
    """

    def __init__(
        self,
        command: Sequence[str],
        tell: Callable[..., None],
        *,
        first_pause_s: float = FIRST_PAUSE_S,
        inherited: Sequence[int] = (),
    ) -> None:
        self._command = list(command)
        self._tell = tell
        self._first_pause_s = first_pause_s
        self._inherited = tuple(inherited)
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        # Only once the thread that started a process ends does the kernel take its parent for dead: so one thread
        # starts all of them, and lives as long as they do.
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def terminate(self) -> None:
        """Tell the process to end, and start it no more."""
        self._ending.set()
        with self._lock:
            if self._process is not None:
                self._process.terminate()

    def __exit__(self, *error: object) -> None:
        self.terminate()
        process = self._process
        if process is not None:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
        self._thread.join()

    def _run(self) -> None:
        pause_s = self._first_pause_s
        while True:
            with self._lock:
                if self._ending.is_set():
                    return
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=self._inherited
                )
            began = monotonic()
            code = self._process.wait()
            if self._ending.is_set():
                return
            if monotonic() - began > STEADY_S:
                pause_s = self._first_pause_s
            end = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._tell("process_died", process=self._process.pid, end=end, starts_again_in_s=pause_s)
            if self._ending.wait(pause_s):
                return
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent goes, however it goes; elsewhere than on Linux, do nothing."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)  # it went before the kernel was told
