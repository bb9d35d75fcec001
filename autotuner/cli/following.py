"""A job's progress, as it is shown while somebody waits for it."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from autotuner.cli.plain import plain
from autotuner.cli.printing import STAGES, ProgressLines, err, progress_bars

if TYPE_CHECKING:
    from autotuner.server.wire import JobView, ProgressView


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
    counts = (("measured", progress.measured), ("reused", progress.reused), ("failed", progress.failed))
    parts = [", ".join(f"{count:,} {name}" for name, count in counts if count)]
    if progress.best_us is not None:
        gap = "" if progress.gap is None else f", gap {progress.gap:.1%}"
        expected = "" if progress.estimated_gap is None else f", {progress.estimated_gap:.1%} by estimate"
        parts.append(f"best {progress.best_us:,.1f} us{gap}{expected}")
    if progress.note:
        parts.append(progress.note)
    if progress.eta_s:
        parts.append(f"{progress.eta_s:,.0f} s left")
    return "; ".join(part for part in parts if part)
