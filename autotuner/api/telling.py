"""Telling how far tuning and compiling are: to the user's own `watch`, or on standard error in the format asked for."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotuner.api.progress_json import JsonPrinter
from autotuner.api.progress_lines import ProgressPrinter
from autotuner.plan.configuration import Configuration
from autotuner.settings import ProgressFormat, Settings

if TYPE_CHECKING:
    from autotuner.tuner import Progress, Watch

Say = Callable[[str], None]
"""Prints a line."""

Printer = ProgressPrinter | JsonPrinter

_LINE = ProgressPrinter()
PRINTERS: dict[ProgressFormat, Printer] = {
    "auto": _LINE, "rich": _LINE, "lines": ProgressPrinter(changes=False), "json": JsonPrinter(),
}  # fmt: skip
"""Printers by format, also for what is said beside a live display; "none" has none."""


def show(progress: "Progress") -> None:
    """Print progress on standard error; the default of `watch`."""
    printer = PRINTERS.get(progress_format())
    if printer is not None:
        printer(progress)


@dataclass(frozen=True)
class Told:
    """A tuning that is told of.

    Args:
        watch: is called with its progress.
        found: is called with its answer.
    """

    watch: "Watch"
    found: Callable[[Configuration], None]


class Teller:
    """Tells of tunings, to the user's own `watch` or on standard error.

    Args:
        watch: `show` prints; None is silent; any other is called with the progress, and nothing is printed.
    """

    def __init__(self, watch: "Watch | None") -> None:
        self._format: ProgressFormat = progress_format() if watch is show else "none"
        self._printer = PRINTERS.get(self._format)
        self._own: Watch = _nothing if watch is None or watch is show else watch

    def say(self, text: str) -> None:
        if self._printer is not None:
            self._printer.say(text)

    @contextmanager
    def telling(self, place: str) -> Iterator[Told]:
        """Name a tuning that begins, and yield what is called with its progress and its answer."""
        if self._printer is None:
            yield Told(self._own, _nothing)
            return
        self._printer.begin(place)
        answers: list[Configuration] = []
        try:
            with self._display(place, self._printer) as watch:
                yield Told(watch, answers.append)
            for answer in answers:
                self._printer.found(answer)
        except BaseException as error:
            self._printer.failed(error)
            raise
        finally:
            self._printer.begin("")

    def _display(self, place: str, printer: Printer) -> "AbstractContextManager[Watch]":
        """Return the live display where there can be one, and else what prints."""
        display: AbstractContextManager[Watch] | None = None
        if self._format in ("auto", "rich"):
            try:
                from autotuner.api.progress_view import live_display

                display = live_display(place, printer, forced=self._format == "rich")
            except Exception:  # rich is missing or another one, or standard error is closed
                display = None
        return nullcontext(printer) if display is None else display


def teller_of_backend(quiet: bool) -> Say | None:
    """Return what prints a line about compiling; None where nothing is printed."""
    printer = None if quiet else PRINTERS.get(progress_format())
    return None if printer is None else printer.say


def progress_format() -> ProgressFormat:
    """Return how progress is printed: as the settings say; by nobody but the first process of a training."""
    torch: Any = sys.modules.get("torch")  # not imported for this
    distributed = None if torch is None or not torch.distributed.is_available() else torch.distributed
    is_other = distributed is not None and distributed.is_initialized() and distributed.get_rank() > 0
    settings = Settings.from_environment()
    return "none" if is_other or settings.quiet else settings.progress


def _nothing(_: object) -> None:
    """Tell nobody."""
