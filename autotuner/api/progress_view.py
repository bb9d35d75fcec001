"""Display of a tuning that changes in place at a terminal: stage, calls, the best plan so far and its costliest calls.

It needs rich, which only the command line installs: whoever imports this module has lines for where it is missing.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from threading import Event, Lock, Thread
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from autotuner.plan.phrases import STAGES, microseconds, over_default, plain, short_form, wait

if TYPE_CHECKING:
    from autotuner.tuner import PlannedCall, Progress, Watch

REFRESH_S = 0.5
"""A CPU of few cores times calls meanwhile, and drawing takes 6 ms."""
WIDTH_MIN, HEIGHT_MIN = 40, 8
"""Terminals that are smaller have lines."""
TABLE_HEIGHT_MIN = 16
"""Terminals of fewer rows have the display without its table, which would scroll."""
BAR_WIDTH, SPARKS_WIDTH = 16, 24
SPARKS, ASCII_SPARKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"

_ONE = Lock()
"""Held by the display: two would overwrite each other."""


class TuningView:
    """A tuning run as rich draws it, at its latest progress.

    Args:
        place: what is tuned: a model, or one of several regions.
        clock: in seconds.
        now: returns the local time, of which the expected end is told.
    """

    def __init__(
        self, place: str, clock: Callable[[], float] = monotonic, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self._place, self._clock, self._now = place, clock, now
        self._began = clock()
        self._progress: Progress | None = None
        self._bests: list[tuple[float, float]] = []
        self._ended = ""

    def update(self, progress: "Progress") -> None:
        """Take in how far the run is."""
        best_us = progress.best_us
        if best_us is not None and (not self._bests or self._bests[-1][1] != best_us):
            self._bests.append((self._elapsed_s, best_us))
        self._progress = progress

    def end(self, words: str) -> None:
        """Say how the run ended, in place of its stage."""
        self._ended = words

    @property
    def _elapsed_s(self) -> float:
        return self._clock() - self._began

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        elapsed = str(timedelta(seconds=int(self._elapsed_s)))
        title = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        head = Table.grid(title, Column(justify="right"), padding=(0, 1), pad_edge=False, expand=True)
        head.add_row(Text(plain(self._place), "bold"), Text(elapsed, "dim"))
        yield head
        value = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        rows = Table.grid(Column(width=9, style="dim", no_wrap=True), value, padding=(0, 1), expand=True)
        progress = self._progress
        for label, shown in self._rows(progress, options):
            rows.add_row(label, Text(shown) if isinstance(shown, str) else shown)
        yield rows
        if progress is not None and progress.costliest and console.height >= TABLE_HEIGHT_MIN:
            yield Text()
            yield costliest_table(progress.costliest)

    def _rows(self, progress: "Progress | None", options: ConsoleOptions) -> Iterator[tuple[str, RenderableType]]:
        """Yield labels and what stands beside them; those that depend on a plan only where there is one."""
        if progress is None:
            yield "stage", self._ended or "starting"
            return
        yield "stage", self._stage(progress)
        yield "calls", calls_of(progress)
        if progress.best_us is not None:
            against = over_default(progress.default_us, progress.best_us, is_marked=progress.default_is_marked)
            best = Text(f"{progress.best_us:,.1f} us", "bold")
            yield "best plan", best.append(f", {against}" if against else "", "not bold")
            yield "gap", gap_of(progress)
            yield "over time", self._over_time(progress.best_us, ascii_only=options.ascii_only)
        if not self._ended:
            yield "time left", self._time_left(progress)
        if progress.note:
            yield "waits", plain(progress.note)

    def _stage(self, progress: "Progress") -> RenderableType:
        if self._ended:
            return Text(self._ended, "bold")
        words = f"{progress.stage_number} of {progress.stages}: {STAGES[progress.stage]}"
        if progress.stage == "done":
            return Text(words, "bold")
        bar = ProgressBar(progress.total or None, progress.done, width=BAR_WIDTH, pulse=not progress.total)
        count = f"{progress.done:,} of {progress.total:,}" if progress.total else ""
        row = Table.grid(Column(no_wrap=True), Column(no_wrap=True), Column(no_wrap=True), padding=(0, 1))
        row.add_row(Text(words, "bold"), bar, count)
        return row

    def _over_time(self, best_us: float, *, ascii_only: bool) -> Text:
        first_us = self._bests[0][1]
        if len(self._bests) == 1:
            return Text(f"{first_us:,.1f} us, the first plan")
        drawn = sparks(self._bests, self._elapsed_s, SPARKS_WIDTH, ASCII_SPARKS if ascii_only else SPARKS)
        return Text.assemble(f"{first_us:,.1f} ", (drawn, "cyan"), f" {best_us:,.1f} us")

    def _time_left(self, progress: "Progress") -> str:
        if progress.left_s:
            end = self._now() + timedelta(seconds=progress.left_s)
            return f"{wait(progress.left_s)} until the plan is chosen, at about {end:%H:%M}"
        return f"{wait(progress.eta_s)} of this stage" if progress.eta_s else "not known yet"


def calls_of(progress: "Progress") -> str:
    """Return the calls of a run so far in words."""
    counts = (("measured", progress.measured), ("reused", progress.reused), ("failed", progress.failed))
    words = ", ".join(f"{count:,} {name}" for name, count in counts if count or name == "measured")
    return f"{words}, of these {progress.refused:,} refused" if progress.refused else words


def gap_of(progress: "Progress") -> str:
    """Return how far the best plan may be from the best there can be, in words."""
    if progress.gap is None:
        return "no bound is known yet"
    words = f"{progress.gap:.1%} above the proven bound, {progress.bound_us:,.1f} us"
    return words if progress.estimated_gap is None else f"{words}; {progress.estimated_gap:.1%} by estimate"


def costliest_table(calls: "Sequence[PlannedCall]") -> Table:
    """Return a table of the calls of a plan that take longest."""

    def cut(title: str, ratio: int) -> Column:
        return Column(title, ratio=ratio, no_wrap=True, overflow="ellipsis")

    table = Table.grid(
        cut("the plan's costliest operators", 6), cut("kernel", 4), cut("forms", 3),
        Column("us", justify="right", no_wrap=True),
        Column("share", justify="right", no_wrap=True), padding=(0, 2, 0, 0), pad_edge=False, expand=True,
    )  # fmt: skip
    table.show_header, table.header_style = True, "dim"
    for call in calls:
        names = " + ".join(call.operators) or f"convert {' + '.join(name for name, _ in call.outputs)}"
        forms = ", ".join(dict.fromkeys(short_form(form) for _, form in call.outputs))
        cells = (names, call.kernel, forms, microseconds(call.predicted_us), f"{call.share:.1%}")
        table.add_row(*(Text(plain(text)) for text in cells))
    return table


def sparks(points: Sequence[tuple[float, float]], until: float, width: int, levels: str) -> str:
    """Return values over time as a row of characters: each is the latest value by then, blank before the first.

    Args:
        points: (time, value) pairs, the earliest first.
        until: the time at the right end; that at the left end is 0.
        levels: characters, that of the least value first.
    """
    points = list(points)
    least, most = min(value for _, value in points), max(value for _, value in points)
    drawn = []
    for place in range(1, width + 1):
        values = [value for at, value in points if at <= until * place / width or place == width]
        share = (values[-1] - least) / (most - least) if values and most > least else 0.0
        drawn.append(levels[round(share * (len(levels) - 1))] if values else " ")
    return "".join(drawn)


class LiveDisplay:
    """A view on a terminal while a tuning runs, drawn anew twice a second.

    What goes wrong with drawing ends no tuning: from then on, progress is told otherwise. Leaving the display as a
    context manager shows the cursor again, however the tuning ended.

    Args:
        otherwise: tells progress where the display cannot be drawn.
        stays: the last state stays on the terminal; otherwise the display goes.
    """

    def __init__(self, console: Console, view: TuningView, otherwise: "Watch", *, stays: bool = False) -> None:
        self._console, self._view, self._otherwise = console, view, otherwise
        self._live = Live(
            view, console=console, auto_refresh=False, transient=not stays, redirect_stdout=sys.stdout.isatty()
        )
        self._over = Event()
        self._thread = Thread(target=self._draw, name="progress display", daemon=True)
        self._is_drawn = False

    def __enter__(self) -> Self:
        if _ONE.acquire(blocking=False):
            self._is_drawn = True
            try:
                self._live.start(refresh=True)
                self._thread.start()
            except BaseException as error:
                self._give_up()
                if not isinstance(error, Exception):
                    raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._view.end("done" if kind is None else "ended early")
        self._over.set()
        try:
            if self._thread.is_alive():
                self._thread.join()
        finally:
            self._give_up()

    def __call__(self, progress: "Progress") -> None:
        """Take in progress; it is drawn soon."""
        if self._is_drawn:
            with suppress(Exception):
                self._view.update(progress)
        else:
            self._otherwise(progress)

    def _draw(self) -> None:
        while not self._over.wait(REFRESH_S):
            try:
                self._live.refresh()
            except Exception:
                self._give_up()
                return

    def _give_up(self) -> None:
        """Draw no more, with the terminal as it was before."""
        if not self._is_drawn:
            return
        self._is_drawn = False
        try:
            self._live.stop()
        except Exception:
            with suppress(Exception):
                self._console.show_cursor(True)
        finally:
            _ONE.release()


def live_display(
    place: str, otherwise: "Watch", *, forced: bool = False, console: Console | None = None, stays: bool = False
) -> LiveDisplay | None:
    """Return a display on standard error; None where that is no terminal that can draw one.

    Notebooks have none, nor has a terminal on which a live display of rich's is drawn already.

    Args:
        place: what is tuned.
        otherwise: tells progress where drawing fails.
        forced: also where standard error is not said to be a terminal.
        console: of the program, whose messages then stand above the display.
        stays: as of `LiveDisplay`.
    """
    stream = sys.stderr
    if isinstance(stream, FileProxy) or not (forced or stream.isatty()):
        return None
    if console is None or not console.is_terminal:
        console = Console(stderr=True, force_terminal=forced or None, markup=False, emoji=False, highlight=False)
    is_fit = console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter
    if not is_fit or console.width < WIDTH_MIN or console.height < HEIGHT_MIN:
        return None
    return LiveDisplay(console, TuningView(place), otherwise, stays=stays)
