"""Hand-out: which GPU gets which batch, what is given out a second time, and which call is to blame for lost actors."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from autotuner.ir.records import Call, Measurement
from autotuner.tuner.batches import Batch, Batches
from autotuner.tuner.progress import Result

WINDOW = 2
"""Batches in hand per GPU and job: while one runs, the next is there."""

LATE_FACTOR = 10.0
LATE_AT_LEAST_S = 2.0
LOST_MAX = 2
LATER_S = 0.5
LATER_MAX = 64
"""Batches that wait for their time at most: then nothing is drawn."""

CRASHED = "the process that measures was lost {times} times while it was on this call alone"


Gate = Callable[[Sequence[Call]], tuple[Sequence[Call], Sequence[Call]]]
"""Returns which calls of a batch are to be handed out now, and which later; others need no timing any more."""


def open_gate(calls: Sequence[Call]) -> tuple[Sequence[Call], Sequence[Call]]:
    """Hand out everything now."""
    return calls, ()


@dataclass(frozen=True)
class Order:
    """A batch that is to be sent to a GPU; answers come under its ticket."""

    ticket: int
    slot: str
    batch: Batch


@dataclass
class _Sent:
    """A batch that is out at a GPU."""

    entry: "_Handed"
    slot: str
    given_at: float
    began_at: float | None = None


@dataclass
class _Handed:
    """A batch, what it has cost, and the tickets under which it is out."""

    batch: Batch
    lost: int = 0
    done: bool = False
    tickets: list[int] = field(default_factory=list)


class HandOut:
    """Races on their way to GPUs in batches, until each is answered. Moments are seconds of any clock.

    - Races are drawn from their source as GPUs have room, so that a tuning which knows enough can stop the source.
      After an empty race, the next one is drawn the next time.
    - Each GPU has at most `window` batches in hand. GPUs with fewer come first.
    - A batch whose actor was lost goes to the front. If it was being worked on, it is blamed. One that is blamed twice
      is sent again call by call, and a single call that is blamed twice is `crashed`.
    - Calls of a batch that the gate lets through later are a batch of their own, which is tried again in a while.
    - When nothing else is left, a batch that is later than ten times its estimate is given to a second GPU that has
      nothing in hand. The first answer counts.
    """

    def __init__(
        self,
        races: Iterable[Sequence[Call]],
        batches: Batches,
        window: int = WINDOW,
        tickets: Iterable[int] | None = None,
        gate: Gate = open_gate,
    ) -> None:
        self._source = (batch for race in races for batch in (batches.cut(race) if race else (None,)))
        self._batches = batches
        self._is_drained = False
        self._waiting: deque[_Handed] = deque()
        self._gate = gate
        self._later: deque[tuple[float, _Handed]] = deque()
        self._window = window
        self._tickets = iter(count() if tickets is None else tickets)
        self._sent: dict[int, _Sent] = {}
        self._left = 0
        self._signs: dict[str, float] = {}

    @property
    def is_done(self) -> bool:
        return self._is_drained and self._left == 0

    @property
    def out(self) -> list[int]:
        """The tickets that are out."""
        return list(self._sent)

    def orders(self, slots: Sequence[str], now: float) -> list[Order]:
        """Return what is to be sent now to the GPUs that take part."""
        found = []
        in_hand = {slot: sum(sent.slot == slot for sent in self._sent.values()) for slot in slots}
        while in_hand:
            slot = min(in_hand, key=lambda each: in_hand[each])
            if in_hand[slot] >= self._window:
                break
            entry = self._next(now)
            if entry is None:
                entry = self._late(slot, now) if in_hand[slot] == 0 else None
                if entry is None:
                    break
            found.append(self._send(entry, slot, now))
            in_hand[slot] += 1
        return found

    def slot(self, ticket: int) -> str | None:
        """Return where a batch is out, None where it is not."""
        return self._sent[ticket].slot if ticket in self._sent else None

    def calls(self, ticket: int) -> Sequence[Call]:
        """Return the calls of a batch that is out, none where it is not."""
        return self._sent[ticket].entry.batch.calls if ticket in self._sent else ()

    def began(self, ticket: int, now: float) -> None:
        """Note that an actor has begun with a batch."""
        if ticket in self._sent:
            sent = self._sent[ticket]
            sent.began_at = self._signs[sent.slot] = now

    def answered(self, ticket: int, measured: Mapping[str, Measurement], took_s: float, now: float) -> list[Result]:
        """Return the results of an answer that are new: none where the batch was answered before, or is not out.

        Args:
            measured: by call key.
            took_s: how long the actor worked on it.
        """
        sent = self._sent.pop(ticket, None)
        if sent is None:
            return []
        entry = sent.entry
        entry.tickets.remove(ticket)
        self._signs[sent.slot] = now
        if entry.done:
            return []
        self._end(entry)
        results = [(call, measured[call.key]) for call in entry.batch.calls if call.key in measured]
        return self._batches.join(entry.batch, results, took_s)

    def lost(self, slot: str, *, blamed: bool = True) -> list[Result]:
        """Take the batches of a lost actor back, and return the calls that are `crashed`.

        Args:
            blamed: the actor died, and the host did not: the batch that it worked on may be why.
        """
        tickets = [ticket for ticket, sent in self._sent.items() if sent.slot == slot]
        crashed: list[Result] = []
        back: list[_Handed] = []
        for ticket in tickets:
            sent = self._sent.pop(ticket)
            entry = sent.entry
            entry.tickets.remove(ticket)
            if entry.done:
                continue
            if blamed and sent.began_at is not None:
                entry.lost += 1
            if entry.lost < LOST_MAX:
                back += [] if entry.tickets else [entry]
            elif len(entry.batch.calls) == 1:
                self._end(entry)
                measurement = Measurement("crashed", message=CRASHED.format(times=entry.lost))
                crashed += self._batches.join(entry.batch, [(entry.batch.calls[0], measurement)])
            else:
                self._end(entry)
                singles = [_Handed(batch) for batch in self._batches.singles(entry.batch)]
                self._left += len(singles)
                back += singles
        self._waiting.extendleft(reversed(back))
        return crashed

    def _next(self, now: float) -> _Handed | None:
        """Return the next batch that is to be handed out, None where there is none now."""
        entry = self._drawn(now)
        while entry is not None:
            admitted = self._admitted(entry, now)
            if admitted is not None:
                return admitted
            entry = self._drawn(now)
        return None

    def _admitted(self, entry: _Handed, now: float) -> _Handed | None:
        """Return what the gate lets through of a batch now; what is to come later waits for its time."""
        batch = entry.batch
        ours, later = self._gate(batch.calls)
        if later:
            self._later.append((now + LATER_S, _Handed(self._batches.part(batch, later), entry.lost)))
            self._left += 1
        if not ours:
            self._end(entry)
            return None
        if len(ours) < len(batch.calls):
            entry.batch = self._batches.part(batch, ours)
        return entry

    def _drawn(self, now: float) -> _Handed | None:
        """Return what came back, what waited for its time, or what the source has next; None where there is none."""
        if self._waiting:
            return self._waiting.popleft()
        if self._later and self._later[0][0] <= now:
            return self._later.popleft()[1]
        if len(self._later) >= LATER_MAX:
            return None
        try:
            batch = next(self._source)
        except StopIteration:
            self._is_drained = True
            return None
        if batch is None:
            return None
        self._left += 1
        return _Handed(batch)

    def _send(self, entry: _Handed, slot: str, now: float) -> Order:
        ticket = next(self._tickets)
        if not entry.tickets:
            entry.batch = self._batches.renewed(entry.batch)
        entry.tickets.append(ticket)
        self._sent[ticket] = _Sent(entry, slot, now)
        return Order(ticket, slot, entry.batch)

    def _late(self, slot: str, now: float) -> _Handed | None:
        """Return the batch that has been late for the longest at another GPU, and is out there alone."""
        found = [
            (since, sent.entry)
            for sent in self._sent.values()
            if sent.slot != slot and len(sent.entry.tickets) == 1 and not sent.entry.done
            for since in [sent.began_at or max(sent.given_at, self._signs.get(sent.slot, sent.given_at))]
            if now - since > max(LATE_AT_LEAST_S, LATE_FACTOR * self._batches.pace.estimated_s(sent.entry.batch.calls))
        ]
        return min(found, key=lambda each: each[0])[1] if found else None

    def _end(self, entry: _Handed) -> None:
        """Count a batch as done; its second copy, where there is one, stays out and counts for nothing."""
        entry.done = True
        self._left -= 1
