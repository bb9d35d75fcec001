"""Progress of tuning and compiling as JSON lines: one object a line, for programs."""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from autotuner.plan.configuration import Configuration

if TYPE_CHECKING:
    from autotuner.tuner import Progress

LINE_S = 1.0
"""A stage that lasts has a line every so many seconds."""


class JsonPrinter:
    """Prints events: notes, progress, and how each tuning ended. What cannot be written ends no tuning.

    Every line has `time`, `event` and `place`: the tuning among several, such as "region 2 of 5", or the model.

    | event | keys |
    | --- | --- |
    | note, warning | text |
    | progress | those of `tuner.Progress.to_json`, `stage_number` and `stages` |
    | result | figures of the plan, counts, doubts and the costliest calls: the last line of a tuning |
    | failed, interrupted | error, text; in place of a result |
    """

    def __init__(
        self, stream: Callable[[], TextIO] = lambda: sys.stderr, clock: Callable[[], float] = monotonic
    ) -> None:
        """Print nothing yet.

        Args:
            stream: returns where to print; asked for each line.
            clock: in seconds.
        """
        self._stream, self._clock = stream, clock
        self._lock = Lock()
        self._place = self._stage = self._note = ""
        self._began = clock()
        self._told_at = 0.0

    def begin(self, place: str) -> None:
        """Name the place of what follows."""
        self._place, self._stage, self._note = place, "", ""
        self._began = self._clock()

    def say(self, text: str) -> None:
        """Print a note."""
        self.tell("note", text=text)

    def __call__(self, progress: "Progress") -> None:
        """Print progress at the beginning of a stage, when what is waited for changes, and every second."""
        now, changed = self._clock(), (progress.stage, progress.note) != (self._stage, self._note)
        if changed or progress.stage == "done" or now - self._told_at >= LINE_S:
            self._stage, self._note, self._told_at = progress.stage, progress.note, now
            self.tell(
                "progress", **progress.to_json(), stage_number=progress.stage_number, stages=progress.stages,
            )  # fmt: skip

    def found(self, configuration: Configuration) -> None:
        """Print what a tuning has found."""
        with suppress(Exception):
            self.tell("result", **facts_of(configuration), seconds=round(self._clock() - self._began, 3))

    def failed(self, error: BaseException) -> None:
        """Print why there is no result."""
        event = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        self.tell(event, error=type(error).__name__, text=str(error))

    def tell(self, event: str, **facts: Any) -> None:
        """Print an event with its facts."""
        with self._lock, suppress(Exception):
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            line = json.dumps({"time": time, "event": event, "place": self._place, **facts})
            stream = self._stream()
            stream.write(line + "\n")
            stream.flush()


def facts_of(configuration: Configuration) -> dict[str, Any]:
    """Return what is told of an answer."""
    from autotuner.tuner import costliest_steps

    known, measured = configuration.certificate, configuration.measured
    return {
        "model": configuration.model.reference,
        "device_type": configuration.environment["device_type"],
        "device_name": configuration.environment["device_name"],
        "predicted_us": known.predicted_us,
        "lower_bound_us": known.lower_bound_us,
        "gap": known.proven_gap,
        "estimated_gap": known.estimated_gap,
        "default_us": known.default_us,
        "default_is_marked": known.default_is_marked,
        "measured_us": None if measured is None else measured.plan_us,
        "ratios": {} if measured is None else measured.ratios,
        "counts": dict(configuration.counts),
        "doubts": [doubt.sentence for doubt in configuration.doubts],
        "costliest": [asdict(call) for call in costliest_steps(configuration.steps, known.predicted_us)],
    }
