"""Processes of a tuning run that are started before they are needed, as its progress says."""

from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from autotuner.plan.request import Request
from autotuner.server.worker.timing import TimingProcess
from autotuner.tuner import MeasurerProtocol, Progress, Watch


@runtime_checkable
class Beginning(Protocol):
    """A measurer whose processes may be started before they are needed."""

    def begin(self) -> None:
        """Start them, without waiting for them."""


class StartedAhead:
    """Watch of a tuning run that starts processes ahead, and passes progress on. Leaving it ends the one that times.

    Processes that measure and compile import torch while the space is enumerated. The process that times end to end
    does so while the chosen calls are confirmed, where calls may be compiled beside timing as well; otherwise once all
    is measured. From then on it builds the plan's peers, while the plan is solved for: nothing is timed then.

    Args:
        request: of the run.
        measurer: of the run.
        samples: of the timing end to end, as for `time_apart`; None where there will be none, or not here.
        threads: as for `time_apart`.
    """

    def __init__(
        self, request: Request, measurer: MeasurerProtocol, watch: Watch, samples: int | None, threads: int | None
    ) -> None:
        self._request, self._measurer, self._watch = request, measurer, watch
        self._samples, self._threads = samples, threads
        self.process: TimingProcess | None = None
        self._is_asked = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process is not None:
            self.process.close()

    def __call__(self, progress: Progress) -> None:
        self._watch(progress)
        if progress.stage == "space" and isinstance(self._measurer, Beginning):
            self._measurer.begin()
        is_measured = progress.stage == "solve"
        if self._samples is None or self._is_asked:
            return
        if self.process is None and (is_measured or (progress.stage == "confirm" and self._measurer.compiles_beside)):
            with suppress(OSError):  # otherwise it is started when it is needed, which says why
                self.process = TimingProcess(compiles=self._samples > 0)
        if self.process is not None and is_measured:
            self.process.get_ready(self._request.model, self._request.device_type, self._samples, self._threads)
            self._is_asked = True
