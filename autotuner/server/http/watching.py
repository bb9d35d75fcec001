"""Watching: jobs that somebody follows are read by one query at a time, however many follow them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from autotuner.database import Database, Job
from autotuner.errors import AutotunerError
from autotuner.server.http.threads import WATCHERS

State = tuple[int, bool]
"""Revision of a job, and whether it is lost: what followers are told of."""

LOOK_S = 0.2
HEARTBEAT_S = 10.0
log = logging.getLogger("autotuner.server.http")


class Watched:
    """A job as it was read last, and the event that tells so."""

    def __init__(self, job: Job, event: bytes) -> None:
        self.followers = 0
        self.over = False
        self.changed = asyncio.Event()
        self.tell(job, event)

    @property
    def state(self) -> State:
        return self.job.revision, self.job.is_lost

    def is_news(self, job: Job) -> bool:
        """Say whether a job was read later than the one that is known, and differs from it."""
        return job.revision >= self.job.revision and (job.revision, job.is_lost) != self.state

    def tell(self, job: Job, event: bytes) -> None:
        self.job, self.event = job, event
        self._wake()

    def end(self) -> None:
        """Say that nothing more will be read of it."""
        self.over = True
        self._wake()

    def _wake(self) -> None:
        woken, self.changed = self.changed, asyncio.Event()
        woken.set()


class Watch:
    """The jobs that are followed; while there are any, one task looks for changes, five times a second.

    Args:
        render: returns the event that tells how a job is; once for each change, in a thread.
    """

    def __init__(self, database: Database, render: Callable[[Job], bytes]) -> None:
        self._database = database
        self._render = render
        self._watched: dict[int, Watched] = {}
        self._thread = CapacityLimiter(WATCHERS)
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def followers(self) -> int:
        return sum(watched.followers for watched in self._watched.values())

    def close(self) -> None:
        """End every stream, and those to come after what they have to tell."""
        self._closed = True
        self._end_all()

    async def follow(self, job: Job, event: bytes, told: int) -> AsyncIterator[bytes]:
        """Yield a job's event after each change until it has ended; a comment where nothing happens for long.

        Args:
            job, event: as they were just read.
            told: revision that the client knows.
        """
        watched, seen = self._enter(job, event), (told, False)
        try:
            yield b": events of a job; a comment like this comes every 10 s\n\n"
            while True:
                if watched.state != seen:
                    seen = watched.state
                    yield watched.event
                elif watched.job.ended or watched.over:
                    return
                else:
                    try:
                        await asyncio.wait_for(watched.changed.wait(), HEARTBEAT_S)
                    except TimeoutError:
                        yield b": still here\n\n"
        finally:
            self._leave(job.id, watched)

    def _enter(self, job: Job, event: bytes) -> Watched:
        watched = self._watched.get(job.id)
        if watched is None:
            watched = self._watched[job.id] = Watched(job, event)
            watched.over = self._closed
        elif watched.is_news(job):
            watched.tell(job, event)
        watched.followers += 1
        if self._looking is None and not self._closed:
            self._looking = asyncio.create_task(self._look())
        return watched

    def _leave(self, job_id: int, watched: Watched) -> None:
        watched.followers -= 1
        if not watched.followers and self._watched.get(job_id) is watched:
            del self._watched[job_id]

    async def _look(self) -> None:
        """Tell those who follow what has changed, until nobody follows or the jobs cannot be read."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                if not self._watched or self._closed:
                    return
                known = {job_id: watched.state for job_id, watched in self._watched.items()}
                changed, gone = await run_sync(self._read, known, limiter=self._thread)
                for job, event in changed:
                    if (watched := self._watched.get(job.id)) is not None and watched.is_news(job):
                        watched.tell(job, event)
                for job_id in gone:
                    if (watched := self._watched.pop(job_id, None)) is not None:
                        watched.end()
        except AutotunerError as error:
            # Clients open new streams, and learn from their status what is the matter.
            log.error("events_ended", extra={"facts": {"streams": self.followers, "error": str(error)}})
        except Exception as error:
            log.error("failed", extra={"facts": {"streams": self.followers}}, exc_info=error)
        finally:
            self._looking = None
            self._end_all()

    def _read(self, known: dict[int, State]) -> tuple[list[tuple[Job, bytes]], set[int]]:
        """Return the jobs that have changed, with their events, and the ids of those that are not there any more."""
        revisions = self._database.queue.revisions(known)
        changed = [job_id for job_id, state in revisions.items() if state != known[job_id]]
        jobs = [self._database.queue.job(job_id) for job_id in changed]
        return [(job, self._render(job)) for job in jobs], known.keys() - revisions.keys()

    def _end_all(self) -> None:
        for watched in self._watched.values():
            watched.end()
        self._watched.clear()
