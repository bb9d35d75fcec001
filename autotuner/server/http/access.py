"""Access: who asks, by a bearer token, and what each role may do.

A service without tokens answers this machine alone, and takes everybody there for an administrator. From the first
token on, whoever asks needs one, also where all tokens are revoked or expired.
"""

import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

from anyio import CapacityLimiter, Lock
from anyio.to_thread import run_sync
from starlette.types import Scope

from autotuner.database import PREFIX, ROLES, Database, Role, Token
from autotuner.database.tokens import digest_of
from autotuner.errors import DatabaseError, UnavailableError
from autotuner.server.http.connections import KEEPERS
from autotuner.server.http.problems import Refusal

FRESH_S = 2.0
"""For how long a look-up holds: a token that is revoked is refused so much later, by every process of a service."""

FORWARDED = (
    "forwarded",
    "via",
    "x-real-ip",
    "x-client-ip",
    "x-cluster-client-ip",
    "true-client-ip",
    "cf-connecting-ip",
)
FORWARDED_PREFIX = "x-forwarded-"
"""Headers that proxies add: whoever asks by one is somewhere else, though the connection comes from this machine."""

KEPT_TOKENS = 1024
SECRET = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{43}}")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Quota:
    """The most that one client may have at once. A client is a token, or an address where there are no tokens.

    Args:
        queued: jobs that wait for a worker, in the database and so over all processes.
        streams: open event streams, in each process.
        daily_bytes: of jobs submitted within 24 hours, in the database and so over all processes.
    """

    queued: int = 100
    streams: int = 64
    daily_bytes: int = 2**26


@dataclass(frozen=True, slots=True)
class Caller:
    """A client by the name that logs and jobs have of it, "token 3" or an address, and its role."""

    name: str
    role: Role

    def may(self, role: Role) -> bool:
        """Say whether this one may do what a role may."""
        return ROLES.index(self.role) >= ROLES.index(role)


class Access:
    """The tokens of a service, each looked up at most once in a few seconds.

    Args:
        database: where they are kept.
        local: answer without a token, as long as there is none in the database; for a service of this machine alone.
    """

    def __init__(self, database: Database, *, local: bool = True) -> None:
        self._database = database
        self._local = local
        self._thread = CapacityLimiter(KEEPERS)
        self._known: OrderedDict[str, tuple[float, Token]] = OrderedDict()
        self._any = (-FRESH_S, False)
        self._failed = (-1.0, "")
        # Apart, so that many unknown tokens keep no known one waiting.
        self._asking_known, self._asking_unknown, self._asking_any = Lock(), Lock(), Lock()

    async def caller(self, scope: Scope, role: Role) -> Caller:
        """Return who sends a request, if it may do what a role may.

        Raises:
            Refusal: 401 where a token is missing or not valid, 403 where it is of a lesser role, or where a proxy asks
                for somebody and there are no tokens.
        """
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
        if given:
            found = await self._token(given)
            caller = Caller(f"token {found.id}", found.role)
        elif self._local and not await self.required():
            _check_direct(scope)
            return Caller((scope.get("client") or ("unknown",))[0], "admin")
        else:
            raise _unauthorized(
                "this needs a token: send `Authorization: Bearer TOKEN`; `autotuner token create` makes one"
            )
        if not caller.may(role):
            raise Refusal(
                403,
                f"this needs a token of role {role}, and token {found.id} is of role {found.role}: `autotuner token "
                f"create --role {role}` makes one",
                headers={"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{role}"'},
            )
        return caller

    @property
    def open(self) -> bool:
        """True where everybody was answered without a token when that was last looked at."""
        return self._local and not self._any[1]

    async def required(self) -> bool:
        """Say whether everybody needs a token."""
        if not self._local:
            return True
        asked_at, found = self._any
        if monotonic() - asked_at > FRESH_S:
            async with self._turn(self._asking_any):
                asked_at, found = self._any
                if monotonic() - asked_at > FRESH_S:
                    found = await self._asked(self._database.tokens.exist)
                    self._any = monotonic(), found
        return found

    async def _token(self, given: list[str]) -> Token:
        scheme, _, secret = given[0].partition(" ")
        if len(given) > 1 or scheme.lower() != "bearer":
            raise _unauthorized("send one `Authorization` header, `Authorization: Bearer TOKEN`", wrong=True)
        found = await self._found(secret) if SECRET.fullmatch(secret) else None
        if found is None:
            none = "" if await self.required() else "; it has no tokens at all, so leave out `Authorization`"
            raise _unauthorized(f"this service knows no such token{none}", wrong=True)
        if found.state != "valid":
            detail = f"token {found.id} is {found.state}: `autotuner token create` makes another"
            raise _unauthorized(detail, wrong=True)
        return found

    async def _found(self, secret: str) -> Token | None:
        digest = digest_of(secret)
        kept = self._known.get(digest)
        if kept is not None and monotonic() - kept[0] <= FRESH_S:
            return kept[1]
        async with self._turn(self._asking_unknown if kept is None else self._asking_known):
            kept = self._known.get(digest)
            if kept is not None and monotonic() - kept[0] <= FRESH_S:
                return kept[1]  # another request has asked meanwhile
            found = await self._asked(lambda: self._database.tokens.find(secret))
            if found is None:
                self._known.pop(digest, None)
                return None
            self._known[digest] = monotonic(), found
            self._known.move_to_end(digest)
            while len(self._known) > KEPT_TOKENS:
                self._known.popitem(last=False)
            return found

    @asynccontextmanager
    async def _turn(self, lock: Lock) -> AsyncIterator[None]:
        """Wait for a turn to ask the database; whoever waited while it failed has its failure."""
        began = monotonic()
        async with lock:
            failed_at, why = self._failed
            if failed_at >= began:
                raise UnavailableError(why)
            yield

    async def _asked(self, ask: Callable[[], T]) -> T:
        try:
            return await run_sync(ask, limiter=self._thread)
        except DatabaseError as error:
            self._failed = monotonic(), str(error)
            raise


def _check_direct(scope: Scope) -> None:
    """Check that a request without a token was sent by its client itself.

    Raises:
        Refusal: 403, a proxy sent it.
    """
    for name, _ in scope["headers"]:
        text = name.decode("latin-1").lower()
        if text in FORWARDED or text.startswith(FORWARDED_PREFIX):
            raise Refusal(
                403,
                f"a proxy sent this for somebody (`{text}`), and a service without tokens answers this machine alone: "
                "make a token with `autotuner token create NAME --role admin`, and start the service with "
                "`--trusted-proxy` and the proxy's address",
            )


def _unauthorized(detail: str, *, wrong: bool = False) -> Refusal:
    challenge = 'Bearer error="invalid_token"' if wrong else "Bearer"
    return Refusal(401, detail, headers={"WWW-Authenticate": challenge})
