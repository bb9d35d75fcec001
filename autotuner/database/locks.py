"""Locks that die with their holder: whoever runs jobs holds one under its name for as long as it lives.

On SQLite a lock is a byte of a file beside the database, on PostgreSQL an advisory lock of a session. Both are freed by
the operating system or the server when the holder's process ends, however it ends: nothing is renewed, and no process
is looked for. Who holds a lock is no proof of anything: a session may be lost while its process lives on. So whatever a
runner says of a job is checked by the job's attempt as well (see `contract.Queue`).
"""

import hashlib
import os
import threading
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Protocol

from sqlalchemy import Connection

from autotuner.database.retrying import Retrying
from autotuner.errors import DatabaseError, LockHeldError

LOOK_S = 1.0
"""A holder finds out so often whether it holds its lock still."""

FORGOTTEN_S = 600.0
"""A name that was not asked for in so long is forgotten: those of jobs and workers are asked for far more often."""

END_S = 2.0
TOLD_AFTER_S = 30.0


class Lock(Protocol):
    """One lock of one holder, as an engine makes it."""

    def take(self) -> bool:
        """Take the lock, and return whether it was free.

        Raises:
            DatabaseError: it cannot be had, whoever has it.
        """

    def is_intact(self) -> bool:
        """Say whether the lock that was taken is held still."""

    def drop(self) -> None:
        """Free the lock; it may be taken again."""

    def disown(self) -> None:
        """Leave the lock to the parent, in a process that was forked."""


class LockEngine(Protocol):
    """Makes locks, and sees which are held."""

    patience_s: float
    """For how long a lock must be seen free until its holder counts as gone."""

    def lock(self, name: str) -> Lock: ...

    def held(self, names: Collection[str], connection: Connection | None) -> set[str]:
        """Return those names that somebody holds; on the connection of a transaction, if one is given."""


class Hold:
    """A lock in hand. A thread of its own takes it again where it was lost, and says so.

    Args:
        name: of the lock.
    """

    def __init__(self, name: str, lock: Lock, retrying: Retrying) -> None:
        self.name, self._lock, self._retrying = name, lock, retrying
        self._over = threading.Event()
        self._lost_at: float | None = None
        self.losses = 0
        self._is_parents = False
        self._thread = threading.Thread(target=self._keep, name="lock", daemon=True)

    @property
    def is_held(self) -> bool:
        """True if the lock was held when it was last looked at; while it is not, take no job."""
        return self._lost_at is None

    def begin(self) -> None:
        """Take the lock.

        Raises:
            LockHeldError: another has it.
            DatabaseError: it cannot be had at all.
        """
        if not self._retrying.call(self._lock.take):
            self._lock.drop()
            raise LockHeldError(
                f"{self.name!r} is in use by another process on this database: end that one, or use another name"
            )
        _HOLDS.add(self)
        self._thread.start()

    def end(self) -> None:
        if self._is_parents:
            return
        self._over.set()
        self._thread.join(END_S)
        _HOLDS.discard(self)
        self._lock.drop()

    def disown(self) -> None:
        """Leave the lock to the parent, in a process that was forked.

        The thread is not there, and its locks may be those of a moment in which it held them: they are not touched.
        """
        self._is_parents = True
        self._lock.disown()

    def _keep(self) -> None:
        told_at = 0.0
        while not self._over.wait(LOOK_S):
            if self._lost_at is None and not self._lock.is_intact():
                self._lost_at, told_at = monotonic(), 0.0
                self.losses += 1
                self._retrying.log("lock_lost", name=self.name)
            if self._lost_at is None or self._over.is_set():
                continue
            reason = "another process has it"
            try:
                self._lock.drop()
                taken = self._lock.take()
            except DatabaseError as error:
                taken, reason = False, str(error)
            if taken:
                self._retrying.log("lock_taken_again", name=self.name, after_s=round(monotonic() - self._lost_at, 1))
                self._lost_at = None
            elif monotonic() - told_at > TOLD_AFTER_S:
                told_at = monotonic()
                self._retrying.log("lock_not_taken", name=self.name, error=reason)


class Locks:
    """The locks of a database by name."""

    def __init__(self, engine: LockEngine, retrying: Retrying) -> None:
        self._engine, self._retrying = engine, retrying
        self._free: dict[str, tuple[float, float]] = {}
        """Since when each name was seen free, and when it was asked for last."""
        self._guard = threading.Lock()

    @contextmanager
    def hold(self, name: str) -> Iterator[Hold]:
        """Hold a lock inside; it is freed at the end, or with this process, whichever comes first.

        Raises:
            LockHeldError: another holds it, be it in this process.
            DatabaseError: this system or database has no such locks, or it cannot be reached.
        """
        held = Hold(name, self._engine.lock(name), self._retrying)
        held.begin()
        try:
            yield held
        finally:
            held.end()

    def is_held(self, name: str) -> bool:
        """Say whether somebody holds a lock."""
        return name in self.held([name])

    def held(self, names: Collection[str], connection: Connection | None = None) -> set[str]:
        """Return those of these names that somebody holds."""
        return self._engine.held(names, connection) if names else set()

    def gone(self, names: Collection[str], connection: Connection | None = None) -> set[str]:
        """Return the names whose holders are gone: their locks were seen free for as long as the engine wants.

        A server that starts anew drops all sessions, and their holders need a moment to come back.
        """
        held, now = self.held(names, connection), monotonic()
        with self._guard:
            # A name that nobody asks for any more is that of a runner that was forgotten: none comes again.
            forgotten = [name for name, (_, asked_at) in self._free.items() if now - asked_at > FORGOTTEN_S]
            for name in (*held, *forgotten):
                self._free.pop(name, None)
            for name in names:
                if name not in held:
                    self._free[name] = self._free.get(name, (now, now))[0], now
            return {n for n in names if n not in held and now - self._free[n][0] >= self._engine.patience_s}


def number_of(*words: str) -> int:
    """Return the number of a lock: 62 bits of the sha256 of its words."""
    return int.from_bytes(hashlib.sha256("\0".join(words).encode()).digest()[:8]) >> 2


# A process that is forked without `exec` shares what its parent has open, and would keep the parent's locks alive.

_HOLDS: "weakref.WeakSet[Hold]" = weakref.WeakSet()


def leave_to_the_parent(file: int) -> None:
    """Have a descriptor of a forked process lead nowhere; it stays taken, so nothing else gets its number."""
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nowhere, file, inheritable=False)
    os.close(nowhere)


def _disown_all() -> None:
    for held in list(_HOLDS):
        with suppress(OSError):
            held.disown()


os.register_at_fork(after_in_child=_disown_all)
