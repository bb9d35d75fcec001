"""Pool of actors on a Ray cluster."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

from autotuner.fleet.cluster import LOOK_S, actor_of
from autotuner.fleet.importing import imported
from autotuner.fleet.pool import Answered, Began, Event, Joined, Lost, Question
from autotuner.fleet.roster import gpu_from_json
from autotuner.fleet.spec import MeasurerSpec

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0


@dataclass
class _Slot:
    """One GPU of a host, and the actor that is there or on its way."""

    node: str
    actor: Any = None
    opening: Any = None
    ready: bool = False
    retry_at: float = 0.0
    pause_s: float = FIRST_PAUSE_S


class RayPool:
    """One actor per GPU of the connected cluster, named and detached, shared by all tunings of the cluster.

    Args:
        spec: of the measurer.
        numbers: of the GPUs of each host that are used; None for all.
    """

    def __init__(self, spec: MeasurerSpec, numbers: Collection[int] | None = None) -> None:
        self._ray, self._spec, self._numbers = imported(), spec.to_text(), numbers
        self._slots: dict[str, _Slot] = {}
        self._looked_at = -LOOK_S
        self._tickets: dict[Any, tuple[int, str, Question]] = {}

    @property
    def gpus(self) -> int:
        """The number of GPUs of the cluster's hosts."""
        self._look()
        return len(self._slots)

    def poll(self, timeout_s: float) -> Sequence[Event]:
        events = self._look()
        for name, slot in self._slots.items():
            if slot.actor is None and monotonic() >= slot.retry_at:
                self._start(name, slot)
        openings = {slot.opening: name for name, slot in self._slots.items() if slot.opening is not None}
        waited = [*openings, *self._tickets]
        if not waited:
            if not events:
                sleep(timeout_s)
            return events
        ready, _ = self._ray.wait(waited, num_returns=1, timeout=0 if events else timeout_s)
        if ready:
            ready, _ = self._ray.wait(waited, num_returns=len(waited), timeout=0)
        for reference in ready:
            if reference in openings:
                events += self._opened(openings[reference])
            elif reference in self._tickets:
                events += self._heard(reference)
        return events

    def send(self, ticket: int, slot: str, question: Question, request: Mapping[str, Any]) -> None:
        method = getattr(self._slots[slot].actor, question)
        if question == "measure":
            method = method.options(num_returns="streaming")
        self._tickets[method.remote(self._spec, json.dumps(request))] = ticket, slot, question

    def forget(self, ticket: int) -> None:
        for reference in [reference for reference, (number, *_) in self._tickets.items() if number == ticket]:
            del self._tickets[reference]

    def close(self) -> None:
        self._tickets.clear()
        self._slots.clear()

    def _look(self) -> list[Event]:
        """Follow hosts that come and go."""
        if monotonic() - self._looked_at < LOOK_S:
            return []
        self._looked_at = monotonic()
        found = {
            f"{node['NodeID'][:12]}/{number}": node["NodeID"]
            for node in self._ray.nodes()
            if node["Alive"]
            for number in range(int(node["Resources"].get("GPU", 0)))
            if self._numbers is None or number in self._numbers
        }
        events: list[Event] = []
        for name in self._slots.keys() - found.keys():
            events += self._lose(name, host=True)
            del self._slots[name]
        for name, node in found.items():
            self._slots.setdefault(name, _Slot(node))
        return events

    def _start(self, name: str, slot: _Slot) -> None:
        try:
            slot.actor = actor_of(name, slot.node)
            slot.opening = slot.actor.open.remote(self._spec)
        except (ValueError, self._ray.exceptions.RayError):  # the actor of before is about to end
            slot.actor, slot.retry_at = None, monotonic() + slot.pause_s

    def _opened(self, name: str) -> list[Event]:
        slot = self._slots[name]
        reference, slot.opening = slot.opening, None
        try:
            answer = json.loads(self._ray.get(reference))
        except self._ray.exceptions.RayError as error:
            return self._lose(name, host=_is_of_host(error))
        if "gpu" not in answer:
            return self._lose(name, answer.get("failed") or answer.get("refused", ""))
        try:
            gpu = gpu_from_json(answer["gpu"])
        except (KeyError, TypeError, ValueError) as error:
            return self._lose(name, f"its actor is of another version, and answers otherwise: {error!r}")
        slot.ready, slot.pause_s = True, FIRST_PAUSE_S
        return [Joined(gpu)]

    def _heard(self, reference: Any) -> list[Event]:
        ticket, name, question = self._tickets[reference]
        try:
            if question == "measure":
                text = self._ray.get(next(reference))
                if text == "began":
                    return [Began(ticket)]
            else:
                text = self._ray.get(reference)
        except StopIteration:
            del self._tickets[reference]
            return []
        except self._ray.exceptions.RayError as error:
            return self._lose(name, host=_is_of_host(error))
        del self._tickets[reference]
        answer = json.loads(text)
        if "failed" in answer:
            return self._lose(name, answer["failed"])
        return [Answered(ticket, answer)]

    def _lose(self, name: str, failure: str = "", *, host: bool = False) -> list[Event]:
        """Forget an actor and what it was asked; the next one starts after a pause that doubles with each failure."""
        slot = self._slots[name]
        self._tickets = {reference: sent for reference, sent in self._tickets.items() if sent[1] != name}
        was_ready, slot.actor, slot.opening, slot.ready = slot.ready, None, None, False
        slot.retry_at = monotonic() + slot.pause_s
        slot.pause_s = min(LONGEST_PAUSE_S, 2 * slot.pause_s)
        return [Lost(name, failure, host)] if was_ready or failure else []


def _is_of_host(error: Exception) -> bool:
    """Say whether an actor was lost because its host was."""
    return "node has died" in str(error) or "node was" in str(error)
