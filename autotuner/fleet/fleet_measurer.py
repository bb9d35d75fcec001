"""Measurer of a fleet: the tuner's measurer over the GPUs of a pool."""

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from time import monotonic
from typing import Any

from autotuner import errors
from autotuner.checkpoint import checkpoint
from autotuner.database import FleetGpu
from autotuner.errors import AutotunerError, MeasureError, stacklevel
from autotuner.fleet.compiling import HostCompilation
from autotuner.fleet.handout import WINDOW, HandOut
from autotuner.fleet.in_hand import Alone, Claims
from autotuner.fleet.pool import ActorPool, Answered, Began, Event, Joined, Lost
from autotuner.fleet.roster import Gpu, Roster
from autotuner.ir.device import CPU
from autotuner.ir.records import Call, Environment, Measurement
from autotuner.kernels import KERNELS
from autotuner.measure.devices.cuda import TIMING_CORES
from autotuner.measure.roofline import Roofline
from autotuner.plan.configuration import Configuration
from autotuner.tuner.batches import Batches
from autotuner.tuner.progress import Result, Shared

POLL_S = 0.2
FIRST_S = 300.0
"""The time in which one GPU at least must be ready."""

ALL_S = 10.0
"""The time that is waited for the other GPUs once one is ready."""

HOPELESS_S = 20.0
"""The time that is waited where every GPU that was seen has failed."""

ASK_TIMES = 3

CLAIM_S = 3.0
"""A job that times calls says so at least so often, and keeps those that it has in hand."""

Log = Callable[..., None]
Report = Callable[[Sequence[FleetGpu]], None]


def silent(_event: str, **_facts: object) -> None:
    """Log nothing."""


def unheard(_gpus: Sequence[FleetGpu]) -> None:
    """Report to nobody."""


class FleetMeasurer:
    """Measures calls on all GPUs of one class, as `autotuner.measure.Measurer` does on one.

    Args:
        pool: of actors.
        roster: of GPUs.
        window: batches in hand per GPU: more for a job of higher priority.
        gpus: the number of GPUs that are waited for at the start.
        log: called with an event and facts.
        report: called with how the GPUs stand, when that may have changed.
        claims: returns the calls that the cluster's jobs have in hand in an environment.
    """

    def __init__(
        self,
        pool: ActorPool,
        roster: Roster,
        *,
        window: int = WINDOW,
        gpus: int = 1,
        log: Log = silent,
        report: Report = unheard,
        claims: Callable[[Environment], Claims] = lambda _: Alone(),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._pool, self._roster, self._window, self._clock = pool, roster, window, clock
        self._log, self._report = log, report
        self._tickets = count(1)
        self._compilation = HostCompilation({}, self._tickets)
        self._failure = ""
        self._backlog: list[Event] = []
        self.waited_s = 0.0
        self._told: Callable[[str], None] = lambda _words: None
        self._await_gpus(gpus)
        self._claims, self._claimed_at = claims(self.environment), self._clock()
        self._answered: set[str] = set()
        """Keys of calls in this job's hand that have results. While there is no other job, these are not stored yet."""

    def __enter__(self) -> "FleetMeasurer":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def environment(self) -> Environment:
        """The environment of the GPUs that take part."""
        assert self._roster.environment is not None
        return self._roster.environment

    @property
    def devices(self) -> int:
        """The number of GPUs that time at once."""
        return max(1, len(self._roster.usable(self._clock())))

    @property
    def roster(self) -> Roster:
        return self._roster

    def hear(self, tell: Callable[[str], None]) -> None:
        """Have it told while there is no GPU to measure on, and with "" when that is over."""
        self._told = tell

    def close(self) -> None:
        self._pool.close()

    def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[Result]:
        """Time calls on all GPUs, and yield each result as it comes; each distinct call of a race once.

        The next race is drawn when a GPU has room for it.

        Raises:
            MeasureError: no GPU can measure.
        """
        return self._measured(HandOut(races, Batches(self.devices), self._window, self._tickets))

    def measure_shared(self, races: Iterable[Sequence[Call]], run: Shared) -> Iterator[Result]:
        """Time calls as `measure` does, less those that other jobs of the cluster time: these are left to them."""
        gate = partial(self._gate, run)
        handout = HandOut(races, Batches(self.devices), self._window, self._tickets, gate)
        try:
            yield from self._measured(handout, run)
        finally:
            try:
                self._give_back(run)
            finally:
                self._claims.leave()

    def _give_back(self, run: Shared) -> None:
        """Release the calls that have results, which are stored by then: another job looks them up once it has them."""
        if self._answered:
            run.flush()
            self._claims.release(self._answered)
            self._answered.clear()

    def _gate(self, run: Shared, calls: Sequence[Call]) -> tuple[Sequence[Call], Sequence[Call]]:
        """Take what is under way of a batch into this job's hand; return what is its own, and what another one has.

        A call is claimed and then looked up, as others store and then release. Both parts keep what leads the batch.
        """
        wanted = {call.key for call in calls if call.key in run.under_way}
        elsewhere, self._claimed_at = set(self._claims.claim(sorted(wanted))), self._clock()
        mine = [call for call in calls if call.key in wanted - elsewhere]
        if mine:
            run.look_up_again(mine)
        known = wanted - run.under_way
        if known:
            self._claims.release(known)
        ours = wanted - elsewhere - known
        return (
            [call for call in calls if call.key in ours or call.key not in wanted] if ours else (),
            [call for call in calls if call.key in elsewhere or call.key not in wanted] if elsewhere else (),
        )

    def _measured(self, handout: HandOut, run: Shared | None = None) -> Iterator[Result]:
        """Yield the results of what is handed out; of a shared run, they are stored before their calls are released."""
        try:
            while True:
                checkpoint()
                self._hand_out_compiling()
                for order in handout.orders([gpu.slot for gpu in self._usable()], self._clock()):
                    calls = [call.to_json() for call in order.batch.calls]
                    self._pool.send(order.ticket, order.slot, "measure", {"calls": calls})
                if handout.is_done:
                    return
                if run is not None and self._clock() - self._claimed_at > CLAIM_S:
                    self._claims.claim(())
                    self._claimed_at = self._clock()
                for event in self._events():
                    if run is not None and isinstance(event, Answered):
                        self._answered.update(call.key for call in handout.calls(event.ticket))
                    results = self._taken(handout, event)
                    if run is not None:
                        self._answered.update(call.key for call, _ in results)
                    yield from results
                if run is not None and self._claims.has_others:
                    self._give_back(run)
        finally:
            for ticket in handout.out:
                self._pool.forget(ticket)

    def prepare(self, calls: Sequence[Call]) -> Iterator[tuple[Call, Measurement | None]]:
        """Compile calls on every host, for each keeps the code that it times; yield each when the last host has it."""
        self.compile_beside([call for call in calls if KERNELS[call.candidate.kernel].compiles])
        try:
            while not self._compilation.is_over:
                checkpoint()
                self._hand_out_compiling()
                self._events()
                yield from self._compilation.built()
        finally:
            self.compile_beside(())

    @property
    def compiles_beside(self) -> bool:
        """True for all but the CPU: they are timed on cores that do not compile."""
        return self.environment.device_type != CPU

    def compile_beside(self, calls: Sequence[Call]) -> None:
        """Have calls compiled in this order on every host while others are timed, in place of those that wait."""
        if not calls:
            for ticket in self._compilation.out:
                self._pool.forget(ticket)
            self._compilation = HostCompilation({}, self._tickets)
            return
        if self._compilation.is_over:
            gpus = self._usable()
            timing = Counter(gpu.host for gpu in gpus)
            spare = {gpu.host: gpu.cores - TIMING_CORES * timing[gpu.host] for gpu in gpus}
            self._compilation = HostCompilation(spare, self._tickets)
        self._compilation.ask(calls)

    def take_compiled(self) -> Sequence[tuple[Call, Measurement | None]]:
        """Return the calls that every host has compiled since this was asked: with None, or with why one has not."""
        return self._compilation.built()

    def noise_floor(self) -> float:
        """Return the relative difference that two identical calls show on one GPU."""
        return float(self.ask({"do": "noise"})["noise"])

    def ceilings(self, dtypes: Collection[str]) -> Roofline:
        """Return what one GPU of the class can do at best."""
        return Roofline.from_facts(self.ask({"do": "ceilings", "dtypes": sorted(dtypes)})["ceilings"])

    def time_whole(self, configuration: Configuration, samples: int) -> Configuration:
        """Return a configuration with its whole plan timed on one GPU."""
        asked = {"do": "whole", "configuration": configuration.to_json(), "samples": samples}
        return Configuration.from_json(self.ask(asked)["configuration"])

    def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer of one GPU; another one is asked where an actor is lost.

        Raises:
            AutotunerError: the answer is an error, or actors were lost `ASK_TIMES` times.
        """
        for _ in range(ASK_TIMES):
            slot, ticket = self._usable()[0].slot, next(self._tickets)
            self._pool.send(ticket, slot, "ask", request)
            is_out = True
            try:
                while is_out:
                    checkpoint()
                    for event in self._events():
                        if isinstance(event, Answered) and event.ticket == ticket:
                            is_out = False
                            return self._heard(event.answer)
                        is_out = is_out and not (isinstance(event, Lost) and event.slot == slot)
            finally:
                if is_out:
                    self._pool.forget(ticket)
        raise MeasureError(f"{ASK_TIMES} actors were lost while they were asked for {request['do']!r}: {self._failure}")

    def _taken(self, handout: HandOut, event: Event) -> Sequence[Result]:
        """Return the results that an event brings."""
        if isinstance(event, Began):
            handout.began(event.ticket, self._clock())
        elif isinstance(event, Lost):
            return handout.lost(event.slot, blamed=not event.failure and not event.host)
        elif isinstance(event, Answered):
            slot = handout.slot(event.ticket)
            if slot is None:
                return ()
            answer = self._heard(event.answer)
            if answer.get("canary_us") is not None and self._roster.note_canary(slot, answer["canary_us"]):
                self._report(self._roster.shown(self._clock()))
            self.waited_s += float(answer.get("waited_s", 0.0)) / self.devices
            measured = {key: Measurement.from_json(value) for key, value in answer["results"]}
            return handout.answered(event.ticket, measured, float(answer["took_s"]), self._clock())
        return ()

    def _events(self) -> Sequence[Event]:
        """Return what has happened: first what came while a GPU was waited for. What was compiled is noted."""
        found, self._backlog = self._backlog, []
        found = found or list(self._polled())
        for event in found:
            if isinstance(event, Answered) and event.ticket in self._compilation.out:
                results = self._heard(event.answer)["results"]
                self._compilation.answered(
                    event.ticket,
                    ((key, None if value is None else Measurement.from_json(value)) for key, value in results),
                )
            elif isinstance(event, Lost):
                self._compilation.lost(event.slot)
        return found

    def _hand_out_compiling(self) -> None:
        """Give actors what is still to be compiled."""
        for ticket, gpu, chunk in self._compilation.orders(self._roster.usable(self._clock()), self._clock()):
            self._pool.send(ticket, gpu.slot, "compile", {"calls": [call.to_json() for call in chunk]})

    def _polled(self) -> Sequence[Event]:
        """Ask the pool what has happened, and keep the roster true."""
        events = self._pool.poll(POLL_S)
        for event in events:
            if isinstance(event, Joined):
                self._roster.join(event.gpu)
                why = self._roster.why_not(event.gpu.slot, self._clock())
                self._log("gpu_joined", gpu=event.gpu.slot, uuid=event.gpu.uuid, host=event.gpu.host, left_out=why)
            elif isinstance(event, Lost):
                self._failure = event.failure or self._failure
                self._roster.lose(event.slot, self._clock(), event.failure, host=event.host)
                self._log("gpu_lost", gpu=event.slot, failure=event.failure, host=event.host)
        if any(isinstance(event, Joined | Lost) for event in events):
            self._report(self._roster.shown(self._clock()))
        return events

    def _heard(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an answer, after its warnings were passed on.

        Raises:
            AutotunerError: it is an error.
        """
        for message in answer.get("warnings", ()):
            warnings.warn(message, stacklevel=stacklevel())
        if "refused" in answer:
            kind = getattr(errors, answer["error"], MeasureError)
            raise kind(answer["refused"]) if issubclass(kind, AutotunerError) else MeasureError(answer["refused"])
        return answer

    def _usable(self) -> list[Gpu]:
        """Return the GPUs that take part; where there is none, wait for one, and say so.

        Raises:
            MeasureError: there is none for long, or every one is left out.
        """
        found = self._roster.usable(self._clock())
        if found:
            return found
        began = self._clock()
        while not found:
            checkpoint()
            self._told("waiting for a GPU of the fleet")
            self._backlog += self._polled()
            found = self._roster.usable(self._clock())
            waited_s = self._clock() - began
            if not found and waited_s > (HOPELESS_S if self._roster.is_hopeless(self._clock()) else FIRST_S):
                raise MeasureError(self._nobody())
        self.waited_s += self._clock() - began
        self._told("")
        return found

    def _nobody(self) -> str:
        rows = [gpu for gpu in self._roster.shown(self._clock()) if gpu.reason]
        why = "; ".join(f"{gpu.host or 'GPU'} {gpu.slot}: {gpu.reason}" for gpu in rows) or self._failure
        return f"no GPU of the fleet can measure{why and f': {why}'}"

    def _await_gpus(self, gpus: int) -> None:
        """Wait for the first GPU, and a little for the others."""
        try:
            self._usable()
            until = self._clock() + ALL_S
            while len(self._roster.present()) < gpus and self._clock() < until:
                checkpoint()
                self._backlog += self._polled()
        except BaseException:
            self._pool.close()
            raise
