"""Ledger of a run: the measurements of a space's calls, what is still missing, and what is to be stored."""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autotuner.database import Database
from autotuner.ir.records import Call, Measurement
from autotuner.space import Space
from autotuner.tuner.doubts import distrusted
from autotuner.tuner.policy import TuningPolicy
from autotuner.tuner.progress import Result
from autotuner.tuner.races import Competitors
from autotuner.tuner.state import TuningState


@dataclass(frozen=True)
class Known:
    """Measurements of a space at the end of a run.

    Args:
        measurements: by call key, failures included.
        fresh: keys of those measured in this run.
        counts: for people, by name.
    """

    measurements: Mapping[str, Measurement]
    fresh: frozenset[str]
    counts: Mapping[str, int]

    @property
    def complete(self) -> bool:
        """True if no unknown call is expected to make a difference, and none is doubtful and not timed again."""
        return self.counts["unknown"] == self.counts["unneeded"] and not self.counts["stale"]

    def with_opened(self, opened: Collection[str], counts: Mapping[str, int]) -> "Known":
        """Return the same with the calls of the first plan counted as measured in this run, and with more counts."""
        fresh = self.fresh | self.measurements.keys() & opened
        told = {"measured": len(fresh), "reused": len(self.measurements) - len(fresh)}
        return replace(self, fresh=fresh, counts={**self.counts, **told, **counts})


class Ledger:
    """Measurements of the calls of one space, shared with other processes through the database.

    It begins with what the database has, looks up what other runs have stored since, and stores new results in
    batches. Two runs at once may both measure a call that neither has stored yet: the database keeps the first result.

    Args:
        environment_key: of the environment whose measurements count.
        state: counts what is measured, reused and failed.
        retry: take failed calls as missing.
        unconfirmed: keys of calls that were measured once, earlier in this run.

    Attributes:
        known: measurements by call key.
        missing: calls that may be measured in this run, by key; they stay here when they become known.
        before: doubtful measurements that are to be taken again, by call key.
        fresh: keys of calls that were measured here.
        under_way: keys of calls that were sent to the measurer and have no result yet.
        unconfirmed: keys of calls that were measured once in this run.
        of_this_run: keys of all calls that were measured in this run.
        done: how many calls of races became known.
        is_news: whether anything became known since it was last set to False.
    """

    def __init__(
        self,
        space: Space,
        database: Database,
        environment_key: str,
        state: TuningState,
        *,
        retry: bool = False,
        unconfirmed: Iterable[str] = (),
    ) -> None:
        self.space, self.state = space, state
        self._database, self._environment_key, self._retry = database, environment_key, retry
        self._unstored = _Unstored(database, environment_key, state.policy)
        self.before: dict[str, Measurement] = {}
        self.known = self._stored(list(space.calls))
        self.missing = {key: call for key, call in space.calls.items() if key not in self.known}
        self.fresh: set[str] = set()
        self.under_way: set[str] = set()
        self.unconfirmed = set(unconfirmed)
        self.of_this_run = set(unconfirmed)
        self.done = 0
        self.is_news = True
        self._stale = 0
        state.reused = len(self.known) - state.measured  # what cell searches have measured is known as well

    def extend(self, calls: Iterable[Call]) -> None:
        """Take more calls of sampled cells into the space, and what the database knows of them."""
        before = self.space.calls
        self.space = self.state.space = self.space.with_calls(calls)
        new = {key: call for key, call in self.space.calls.items() if key not in before}
        self.missing |= new
        self.look_up(new.values())
        self.__dict__.pop("_competitors", None)

    def distrust(self, chosen: Collection[str] | None) -> None:
        """Treat doubtful measurements as missing until they are measured again, or until `fall_back`.

        Args:
            chosen: keys that are doubtful in the latest answer as a whole; None where that is settled.
        """
        doubtful = distrusted(self.space.calls, self.known, chosen) - self.fresh - self.unconfirmed
        self.before = {key: measurement for key, measurement in self.known.items() if key in doubtful}
        self.known = {key: measurement for key, measurement in self.known.items() if key not in doubtful}
        self.missing |= {key: self.space.calls[key] for key in doubtful}
        self.state.reused -= len(doubtful)

    def fall_back(self) -> None:
        """Restore doubtful measurements that were not measured again, and count them if they could matter."""
        stale = {key: measurement for key, measurement in self.before.items() if key not in self.known}
        if stale:
            bounds = self.state.bounds
            self._stale = 0 if bounds is not None and bounds.proven_gap == 0 else len(stale)
            self.known |= stale
            self.is_news = True

    def is_open(self, key: str) -> bool:
        """Say whether a call is still to be measured."""
        return key in self.missing and key not in self.known

    def open_keys(self) -> set[str]:
        """Return the keys of all calls that are still to be measured."""
        return self.missing.keys() - self.known.keys()

    def look_up(self, calls: Iterable[Call]) -> list[Call]:
        """Return the calls that are not known; results that other runs have stored by now become known."""
        calls = list(calls)
        found = self._stored([call.key for call in calls if call.key not in self.known])
        found = {key: measurement for key, measurement in found.items() if key not in self.under_way}
        self.known |= found
        self.is_news |= bool(found)
        self.state.reused += len(found)
        self.done += len(found)
        return [call for call in calls if call.key not in self.known]

    def look_up_again(self, calls: Sequence[Call]) -> None:
        """Look up calls that are under way; those that other runs have stored by now become known."""
        asked = [call.key for call in calls if call.key in self.under_way]
        self.under_way.difference_update(asked)
        self.look_up(self.missing[key] for key in asked if key in self.missing)
        self.under_way.update(key for key in asked if key not in self.known)

    def take(self, call: Call, measurement: Measurement) -> None:
        """Take a result of a race: of a call that is under way, or a newer timing of its incumbent."""
        if call.key in self.under_way:
            self.under_way.discard(call.key)
            self.learn(call, measurement)
            self.done += 1
        else:
            self.renew(call, measurement)

    def learn(self, call: Call, measurement: Measurement) -> None:
        """Take the result of a call that was not known; it is stored with others later."""
        before = self.before.get(call.key)
        if before is not None and before.status == "ok" and measurement.status != "ok":
            measurement = before  # what worked is not lost to one failure
        self.known[call.key] = measurement
        self.fresh.add(call.key)
        self.unconfirmed.add(call.key)
        self.of_this_run.add(call.key)
        self.is_news = True
        self._unstored.add(call, measurement, replaces=call.key in self.before)
        self.state.measured += 1
        self.state.failed += measurement.status != "ok"
        self.state.refused += measurement.status == "refused"
        self.flush(only_if_due=True)

    def renew(self, call: Call, measurement: Measurement) -> None:
        """Take a newer timing of a known call if it worked; it is stored in place of the older one later."""
        if measurement.status == "ok":
            self.known[call.key] = measurement
            self._unstored.add(call, measurement, replaces=True)

    def alike(self, call: Call) -> set[str]:
        """Return the keys of known calls that work and compute the same thing as a call."""
        return {key for key in self._competitors.of(call) & self.known.keys() if self.known[key].status == "ok"}

    def flush(self, *, only_if_due: bool = False) -> None:
        """Store the results that are not stored yet; with `only_if_due`, once they are many or have waited."""
        if not only_if_due or self._unstored.is_due():
            self._unstored.flush()

    def result(self) -> Known:
        calls, known, bounds = self.space.calls, self.known, self.state.bounds
        unknown = len(calls) - len(known)
        is_proven = self.state.is_solved and (bounds is None or (bounds.proven_gap == 0 and not bounds.wanted))
        is_likely = self.state.is_solved and self.state.is_enough_by_twins
        counts = {
            "choices": len(self.space.choices) + len(self.space.conversions),
            "calls": len(calls),
            "measured": len(self.fresh),
            "reused": len(known) - len(self.fresh),
            "unknown": unknown,
            "unneeded": unknown if is_proven or is_likely else 0,
            "unproven": 0 if is_proven or not is_likely else unknown,
            "stale": self._stale,
            "failed": sum(1 for measurement in known.values() if measurement.status != "ok"),
        }
        statuses = Counter(measurement.status for measurement in known.values())
        counts |= {f"status_{status}": count for status, count in sorted(statuses.items())}
        return Known(known, frozenset(self.fresh), counts)

    @cached_property
    def _competitors(self) -> Competitors:
        return Competitors(self.space)

    def _stored(self, keys: Sequence[str]) -> dict[str, Measurement]:
        """Return what the database has of these calls, without doubtful measurements and failures to retry."""
        found = self._database.find(self._environment_key, keys)
        known = {key: m for key, m in found.items() if m.status == "ok" or not self._retry}
        return {key: m for key, m in known.items() if m != self.before.get(key)}


class _Unstored:
    """Results that wait to be stored together."""

    def __init__(self, database: Database, environment_key: str, policy: TuningPolicy) -> None:
        self._database, self._environment_key, self._policy = database, environment_key, policy
        self._new: list[Result] = []
        self._newer: dict[str, Result] = {}
        """Those that replace what is stored, by call key."""
        self._stored_at = time.monotonic()

    def add(self, call: Call, measurement: Measurement, *, replaces: bool) -> None:
        if replaces:
            self._newer[call.key] = (call, measurement)
        else:
            self._new.append((call, measurement))

    def is_due(self) -> bool:
        """Say whether there are many results, or the last were stored long ago, by the policy."""
        waiting = len(self._new) + len(self._newer)
        return (
            waiting >= self._policy.store_after_results
            or time.monotonic() - self._stored_at > self._policy.store_after_s
        )

    def flush(self) -> None:
        if self._new:
            self._database.store(self._environment_key, self._new)
        if self._newer:
            self._database.store(self._environment_key, list(self._newer.values()), replace=True)
        self._new, self._newer, self._stored_at = [], {}, time.monotonic()
