"""Progress of tuning and compiling in words: one line that changes at a terminal, lines elsewhere."""

import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, TextIO

from autotuner.plan.configuration import Configuration
from autotuner.plan.phrases import STAGES, over_default, time_left
from autotuner.settings import is_dumb_terminal

if TYPE_CHECKING:
    from autotuner.tuner import Progress

LINE_S = 10.0
"""Off a terminal, a stage that lasts has a line every so many seconds."""
LIVE_S = 0.1
NAME = "autotuner: "


class ProgressPrinter:
    """Prints progress. What cannot be written is left out: a stream that is closed ends no tuning."""

    def __init__(
        self,
        stream: Callable[[], TextIO] = lambda: sys.stderr,
        clock: Callable[[], float] = monotonic,
        *,
        changes: bool = True,
    ) -> None:
        """Print nothing yet.

        Args:
            stream: returns where to print; asked for each line, since notebooks replace it.
            clock: in seconds.
            changes: at a terminal, one line changes; otherwise there are lines there, too.
        """
        self._stream, self._clock, self._changes = stream, clock, changes
        self._lock = Lock()
        self._place = ""
        self._stage = ""
        self._has_waited = False
        self._told_at = 0.0
        self._is_live = False

    def begin(self, place: str) -> None:
        """Name the place of what follows, such as "region 2 of 5". A line that changed stays as it is."""
        self._place, self._stage = f"{place}: " if place else "", ""
        with self._lock, suppress(OSError, ValueError):
            if self._is_live:
                self._is_live = False
                self._stream().write("\n")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._write(NAME + text, stays=True)

    def __call__(self, progress: "Progress") -> None:
        """Print progress at the beginning of a stage, when the device is first waited for, and after a while."""
        with suppress(OSError, ValueError):
            now = self._clock()
            live = self._changes and is_changeable(self._stream())
            is_new, waits = progress.stage != self._stage, bool(progress.note)
            rested = now - self._told_at >= (LIVE_S if live else LINE_S)
            if not (is_new or rested or (waits and not self._has_waited)):
                return
            self._has_waited = waits or (self._has_waited and not is_new)
            self._stage, self._told_at = progress.stage, now
            if progress.stage != "done":
                self._write(NAME + self._place + line_of(progress), stays=not live)

    def found(self, configuration: Configuration) -> None:
        """Print what a tuning has found."""
        self.say(self._place + gain_of(configuration))

    def failed(self, error: BaseException) -> None:
        """Print nothing: whoever asked for the tuning gets the error."""

    def _write(self, text: str, *, stays: bool) -> None:
        with self._lock, suppress(OSError, ValueError):
            stream = self._stream()
            before = "\r\x1b[K" if self._is_live else ""
            if stays:
                stream.write(f"{before}{text}\n")
            else:
                stream.write(f"\r{text[: shutil.get_terminal_size().columns - 1]}\x1b[K")
            self._is_live = not stays
            stream.flush()


def is_changeable(stream: TextIO) -> bool:
    """Say whether a line on a stream can change: on a terminal that moves its cursor, without a display of rich's."""
    return stream.isatty() and not is_dumb_terminal() and not hasattr(stream, "rich_proxied_file")


def line_of(progress: "Progress") -> str:
    """Return progress as a line: stage, counts, what is expected to be gained, the gap, and the time left."""
    parts = [STAGES[progress.stage] + (f" {progress.done:,} of {progress.total:,}" if progress.total else "")]
    counts = (("measured", progress.measured), ("reused", progress.reused), ("failed", progress.failed))
    parts += [f"{count:,} {name}" for name, count in counts if count]
    parts += [progress.note] if progress.note else []
    parts += [plan_of(progress)] if progress.best_us is not None else []
    left = time_left(progress.eta_s, progress.left_s)
    return ", ".join([*parts, left] if left else parts)


def plan_of(progress: "Progress") -> str:
    """Return the best plan so far: its time, what it gains, and its gap."""
    against = over_default(progress.default_us, progress.best_us, is_marked=progress.default_is_marked)
    parts = [f"best {progress.best_us:,.1f} us{_in_brackets(against)}"]
    parts += [f"gap {progress.gap:.1%}"] if progress.gap is not None else []
    if progress.estimated_gap is not None:
        parts.append(f"{progress.estimated_gap:.1%} by estimate")
    return ", ".join(parts)


def gain_of(configuration: Configuration) -> str:
    """Return what a configuration is expected to gain, and what it was measured to gain."""
    known = configuration.certificate
    against = over_default(known.default_us, known.predicted_us, is_marked=known.default_is_marked)
    parts = [f"{known.predicted_us:,.1f} us predicted{_in_brackets(against)}"]
    parts += [f"gap {known.proven_gap:.1%}"] if known.proven_gap is not None else []
    if configuration.measured is not None and configuration.measured.ratios:
        name, ratio = min(configuration.measured.ratios.items(), key=lambda pair: pair[1])
        parts.append(f"{ratio:.2f}x as fast as {name} end to end, measured")
    return ", ".join(parts)


def _in_brackets(words: str) -> str:
    return f" ({words})" if words else ""
