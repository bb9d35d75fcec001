"""Look-ups: what is asked for over and over, the best configuration by a query that was answered before.

They take a short way to the answer in memory, past the reading and checking of queries; everything else takes the long
way, which answers the same.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from starlette.types import ASGIApp, Receive, Scope, Send

from autotuner.database import Database, Edition, ExactKey
from autotuner.errors import AutotunerError
from autotuner.server.http.access import Access
from autotuner.server.http.answers import ALWAYS_ASK, Answers, Target, names
from autotuner.server.http.connections import LOOKERS
from autotuner.server.http.problems import Refusal
from autotuner.server.http.submissions import ModelFiles, Stamp

PATH = "/v1/configurations/best"
KNOWN_QUERIES = 4096
QUERY_MAX_BYTES = 2048


@dataclass(frozen=True, slots=True)
class KnownQuery:
    """The target of a query, and the model file that it came from; None where the query names a family."""

    target: Target
    model: str | None
    stamp: Stamp | None


class Lookups:
    """Queries that were answered before, and the editions of what they ask for."""

    def __init__(self, database: Database, files: ModelFiles, answers: Answers) -> None:
        self.answers = answers
        self._database = database
        self._files = files
        self._queries: OrderedDict[bytes, KnownQuery] = OrderedDict()
        self._thread = CapacityLimiter(LOOKERS)
        self._asking = asyncio.Lock()
        self._wanted: set[ExactKey] = set()
        self._next: asyncio.Task[dict[ExactKey, Edition]] | None = None

    def learn(self, query: bytes, model: str | None, target: Target) -> None:
        """Remember what a query asks for."""
        if len(query) > QUERY_MAX_BYTES:
            return
        name = None if model is None else model.partition(":")[0]
        self._queries[query] = KnownQuery(target, name, None if name is None else self._files.stamp(name))
        while len(self._queries) > KNOWN_QUERIES:
            self._queries.popitem(last=False)

    def target(self, query: bytes) -> Target | None:
        """Return what a query asks for, if that is known and its model file is still the same."""
        known = self._queries.get(query)
        if known is None or (known.model is not None and self._files.stamp(known.model) != known.stamp):
            return None
        return known.target

    async def edition(self, key: ExactKey) -> Edition:
        """Return the edition of a key as of now: all who ask while a query is under way share the one after it.

        Raises:
            DatabaseError: the database cannot be read.
        """
        self._wanted.add(key)
        if self._next is None:
            self._next = asyncio.create_task(self._ask())
        return (await asyncio.shield(self._next))[key]

    async def _ask(self) -> dict[ExactKey, Edition]:
        async with self._asking:
            wanted, self._wanted, self._next = self._wanted, set(), None
            return await run_sync(self._database.editions.of, wanted, limiter=self._thread)


class Shortcut:
    """Answers look-ups whose answer is in memory, and passes on all other requests."""

    def __init__(self, app: ASGIApp, lookups: Lookups, access: Access) -> None:
        self._app = app
        self._lookups = lookups
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == PATH and scope["method"] == "GET":
            target = self._lookups.target(scope["query_string"])
            if target is not None and await self._answered(target, scope, send):
                return
        await self._app(scope, receive, send)

    async def _answered(self, target: Target, scope: Scope, send: Send) -> bool:
        """Answer from memory, and say whether that was possible."""
        try:
            caller = await self._access.caller(scope, "reader")
            edition = await self._lookups.edition(target.key)
        except (Refusal, AutotunerError):
            return False  # the long way finds the same, and says so
        answer = self._lookups.answers.kept(target, edition)
        if answer is None:
            return False
        state = scope.setdefault("state", {})
        state["route"], state["caller"] = PATH, caller
        tag = answer.tag.encode()
        headers = [(b"etag", tag), (b"cache-control", ALWAYS_ASK.encode())]
        given = next((value for name, value in scope["headers"] if name == b"if-none-match"), None)
        if given is not None and names(given.decode("latin-1"), answer.tag):
            await send({"type": "http.response.start", "status": 304, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return True
        headers += [(b"content-length", b"%d" % len(answer.body)), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})
        return True
