"""Calls, GPUs and a pool without actors, for tests of a fleet."""

from collections.abc import Mapping, Sequence
from typing import Any

from autotuner.fleet.pool import Answered, Began, Event, Joined, Lost, Question
from autotuner.fleet.roster import Gpu
from autotuner.fleet.software import own_software
from autotuner.ir.records import Call, Candidate, Environment, Measurement, Node, Subgraph, TensorType

H200 = Environment("cuda", "NVIDIA H200", (("driver", "1"),))
H100 = Environment("cuda", "NVIDIA H100", (("driver", "1"),))
MATRIX = TensorType((8, 16), "float32")
ADD = Subgraph((Node("add", "ab,ab->ab", (0, 1), (2,)),), (MATRIX,) * 3, (0, 1), (2,))


def call(number: int, kernel: str = "torch_add") -> Call:
    return Call(ADD, Candidate(kernel, ("ab", "ab", "ab"), (("block", number),)))


def calls(count: int, start: int = 0) -> list[Call]:
    return [call(number) for number in range(start, start + count)]


def gpu(number: int, environment: Environment = H200, canary_us: float | None = None, host: str = "one") -> Gpu:
    return Gpu(f"{host}/{number}", host, f"GPU-{host}-{number}", environment, 16, canary_us, own_software())


def timed(us: float = 1.0) -> Measurement:
    return Measurement("ok", us, us, us)


class Clock:
    """A clock that each poll of the pool moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class PlannedPool:
    """Actors that answer after a second, in the order in which they were asked.

    Args:
        deaths: by moment, the slots whose actors die then; they come back five seconds later.
        stuck: slots that never answer from the start.
        deadly: keys of calls that kill the actor which works on them.
        failing: slots whose measurer fails at every question.
    """

    def __init__(
        self,
        gpus: Sequence[Gpu],
        clock: Clock,
        *,
        deaths: Mapping[float, Sequence[str]] | None = None,
        stuck: Sequence[str] = (),
        deadly: Sequence[str] = (),
        failing: Sequence[str] = (),
    ) -> None:
        self.gpus = {gpu.slot: gpu for gpu in gpus}
        self.clock, self.deaths, self.stuck = clock, dict(deaths or {}), set(stuck)
        self.deadly, self.failing = set(deadly), set(failing)
        self.queues: dict[str, list[tuple[int, Question, Mapping[str, Any]]]] = {slot: [] for slot in self.gpus}
        self.back: dict[str, float] = dict.fromkeys(self.gpus, 0.0)
        self.joined: set[str] = set()
        self.sent: list[tuple[str, Question, tuple[str, ...]]] = []
        self.forgotten: list[int] = []
        self.closed = False

    def send(self, ticket: int, slot: str, question: Question, request: Mapping[str, Any]) -> None:
        assert slot in self.joined, "nothing is sent to an actor that is gone"
        keys = tuple(Call.from_json(value).key for value in request.get("calls", ()))
        self.sent.append((slot, question, keys))
        self.queues[slot].append((ticket, question, request))

    def forget(self, ticket: int) -> None:
        self.forgotten.append(ticket)

    def close(self) -> None:
        self.closed = True

    def poll(self, timeout_s: float) -> Sequence[Event]:  # noqa: ARG002
        self.clock.now += 1.0
        assert self.clock.now < 1000, "it never ends"
        events: list[Event] = []
        for moment in [moment for moment in self.deaths if moment <= self.clock.now]:
            for slot in self.deaths.pop(moment):
                events.append(self._die(slot))
        for slot, gpu in self.gpus.items():
            if slot not in self.joined and self.back[slot] <= self.clock.now:
                self.joined.add(slot)
                events.append(Joined(gpu))
            elif slot in self.joined and self.queues[slot] and slot not in self.stuck:
                events += self._worked(slot)
        return events

    def _worked(self, slot: str) -> list[Event]:
        ticket, question, request = self.queues[slot][0]
        keys = [Call.from_json(value).key for value in request.get("calls", ())]
        if slot in self.failing:
            return [self._die(slot, "the GPU is lost")]
        if not self.deadly.isdisjoint(keys):
            return [Began(ticket), self._die(slot)]
        self.queues[slot].pop(0)
        began: list[Event] = [Began(ticket)] if question == "measure" else []
        return [*began, Answered(ticket, self.answer(question, keys, request))]

    def answer(self, question: Question, keys: Sequence[str], _request: Mapping[str, Any]) -> Mapping[str, Any]:
        if question == "compile":
            return {"results": [[key, None] for key in keys]}
        if question == "ask":
            return {"noise": 0.01, "ceilings": {}}
        return {"results": [[key, timed().to_json()] for key in keys], "took_s": 1.0, "waited_s": 0.0}

    def _die(self, slot: str, failure: str = "") -> Lost:
        self.joined.discard(slot)
        self.queues[slot].clear()
        self.back[slot] = self.clock.now + 5
        return Lost(slot, failure)
