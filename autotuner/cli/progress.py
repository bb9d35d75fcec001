"""Progress on standard error, while a tuning run measures or a job of a service is followed."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from autotuner.cli.console import err
from autotuner.plan.phrases import STAGES, plain

if TYPE_CHECKING:
    from autotuner.api.progress_json import JsonPrinter
    from autotuner.plan.configuration import Configuration
    from autotuner.server.wire.responses import JobView, ProgressView
    from autotuner.settings import ProgressFormat
    from autotuner.tuner import Progress as TuningProgress

LINE_S = 5.0


def progress_bars() -> Progress:
    """Return bars on standard error: what is done, how far, for how long, and a note."""
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("{task.fields[note]}", markup=False), console=err,
    )  # fmt: skip


class ProgressLines:
    """Progress where standard error is no terminal: a line when a stage begins, and every few seconds meanwhile."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._stage = ""
        self._has_waited = False
        self._told_at = 0.0

    def __call__(self, stage: str, text: str, *, waits: bool = False) -> None:
        """Print a line, unless it is of the stage of the last one and that was moments ago.

        Args:
            waits: the text says what is waited for; the first time in a stage, that is printed at once.
        """
        now = self._clock()
        is_new = stage != self._stage
        if is_new or (waits and not self._has_waited) or now - self._told_at >= LINE_S:
            self._has_waited = waits or (self._has_waited and not is_new)
            self._stage, self._told_at = stage, now
            err.print(text, soft_wrap=True)


class Shown:
    """Progress of a tuning run on standard error, in the format that was asked for.

    Args:
        progress_format: `auto` is a display at a terminal and lines elsewhere, `rich` a display in any case.
        place: the model that is tuned.
    """

    def __init__(self, progress_format: "ProgressFormat", place: str = "") -> None:
        self._format, self._place = progress_format, place
        self._json: JsonPrinter | None = None
        self._watch: Callable[[TuningProgress], None] = lambda _: None
        self._contexts = ExitStack()

    def __enter__(self) -> "Shown":
        if self._format == "none":
            return self
        if self._format == "json":
            from autotuner.api.progress_json import JsonPrinter

            self._watch = self._json = JsonPrinter()
            self._json.begin(self._place)
            self._contexts.enter_context(_warnings_as(self._json))
            return self
        lines = ProgressLines()

        def tell(progress: "TuningProgress") -> None:
            from autotuner.api.progress_lines import line_of

            lines(progress.stage, line_of(progress), waits=bool(progress.note))

        self._watch = tell
        if self._format != "lines":
            from autotuner.api.progress_view import live_display

            display = live_display(self._place, tell, forced=self._format == "rich", console=err, stays=True)
            self._watch = tell if display is None else self._contexts.enter_context(display)
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.__exit__(*error)

    def __call__(self, progress: "TuningProgress") -> None:
        self._watch(progress)

    def found(self, configuration: "Configuration") -> None:
        """Tell a program what the run has found; people read it on standard output."""
        if self._json is not None:
            self._json.found(configuration)

    def tells(self, error: BaseException) -> bool:
        """Tell a program why there is no answer, and say whether that was done."""
        if self._json is not None:
            self._json.failed(error)
        return self._json is not None


@contextmanager
def _warnings_as(lines: "JsonPrinter") -> Iterator[None]:
    """Print warnings as events."""

    def tell(message: Warning | str, *_: object, **__: object) -> None:
        lines.tell("warning", text=str(message))

    before, warnings.showwarning = warnings.showwarning, tell
    try:
        yield
    finally:
        warnings.showwarning = before


class Followed:
    """One line on standard error that changes with the job; where that is no terminal, lines.

    `quiet` shows nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self.bars = progress_bars()
        self._live = err.is_terminal and not quiet
        self._context = self.bars if self._live else nullcontext()
        self._task: Any = None
        self._lines = ProgressLines()

    def __enter__(self) -> "Followed":
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def __call__(self, job: "JobView") -> None:
        """Show a job as it is now."""
        stage = plain(stage_of(job))
        note = "" if job.progress is None else note_of(job.progress)
        if self._live:
            if self._task is None:
                self._task = self.bars.add_task(stage, total=None, note="")
            done, total = (job.progress.done, job.progress.total) if job.progress else (0, 0)
            self.bars.update(self._task, description=stage, completed=done, total=total or None, note=note)
        elif not self._quiet:
            place = f" {job.progress.done:,} of {job.progress.total:,}" if job.progress and job.progress.total else ""
            is_over = job.ended or job.progress is None
            words = "; ".join(text for text in (stage + ("" if is_over else place), note) if text)
            self._lines(stage, words, waits=job.progress is not None and bool(job.progress.note))


def stage_of(job: "JobView") -> str:
    """Say in a few words what happens to a job now."""
    if job.state == "queued" and job.waits_for is not None:
        return f"job {job.id} waits for job {job.waits_for}, which has the same request"
    if job.state == "queued":
        return f"job {job.id} waits for a worker"
    if job.stalled:
        return f"job {job.id} is stalled: {job.stalled}"
    if job.ended or job.progress is None:
        return f"job {job.id} {job.state}"
    stage = STAGES.get(job.progress.stage, job.progress.stage)
    return f"job {job.id} {'is being cancelled' if job.cancelling else stage}"


def note_of(progress: "ProgressView") -> str:
    """Say how far a job is: calls, the best plan so far, its gap, and how long it may take."""
    from autotuner.plan.phrases import time_left

    counts = (("measured", progress.measured), ("reused", progress.reused), ("failed", progress.failed))
    parts = [", ".join(f"{count:,} {name}" for name, count in counts if count)]
    if progress.best_us is not None:
        gap = "" if progress.gap is None else f", gap {progress.gap:.1%}"
        expected = "" if progress.estimated_gap is None else f", {progress.estimated_gap:.1%} by estimate"
        parts.append(f"best {progress.best_us:,.1f} us{gap}{expected}")
    if progress.note:
        parts.append(progress.note)
    parts.append(time_left(progress.eta_s, progress.left_s))
    return "; ".join(part for part in parts if part)
