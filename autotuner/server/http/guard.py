"""Guard: pages of other sites can neither read through a name of their own (DNS rebinding) nor change anything.

Whether a request comes from another site is decided as in Go's `http.CrossOriginProtection`.
"""

import re
import socket
from collections.abc import Collection, Iterable
from functools import lru_cache
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autotuner.errors import InputError
from autotuner.server.http.problems import problem

LOOPBACK = ("localhost", "127.0.0.1", "::1")
SAFE = ("GET", "HEAD", "OPTIONS", "TRACE")
AUTHORITY = re.compile(r"(?:\[(?P<literal>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::(?P<port>[0-9]*))?")
SHOWN_MAX = 100
KEPT_NAMES = 256


class Hosts:
    """Names in the `Host` header that are answered: this machine's own, where it listens, and those that are allowed.

    A service that listens everywhere (0.0.0.0, ::) answers to every address, as no page can choose that, and to the
    machine's name.

    Args:
        served: the addresses or names that it listens at.
        allowed: more names, such as that of a proxy before it.

    Raises:
        InputError: one that is allowed is no host.
    """

    def __init__(self, served: Iterable[str] = (), allowed: Iterable[str] = ()) -> None:
        self._names = {*LOOPBACK, *map(_plain, served)}
        self._everywhere = any(_is_address(name) and ip_address(name).is_unspecified for name in self._names)
        if self._everywhere:
            self._names.add(socket.gethostname().lower())
        for given in allowed:
            named = _read(given if given.count(":") < 2 or given.startswith("[") else f"[{given}]")
            if named is None:
                raise InputError(
                    f"--allow-host (AUTOTUNER_ALLOWED_HOSTS) {given!r}: write a name, such as tuning.example"
                )
            self._names.add(named[0])

    def __contains__(self, name: str) -> bool:
        return name in self._names or (self._everywhere and _is_address(name))


def allowed_origin(text: str) -> str:
    """Return an origin whose pages may ask the service, as browsers name it.

    Raises:
        InputError: it is none, or stands for all.
    """
    scheme, _, authority = text.lower().rstrip("/").partition("://")
    if scheme not in ("http", "https") or _read(authority) is None:
        raise InputError(
            f"--allow-origin {text!r}: write the scheme and host of a site, such as https://tuning.example; all cannot "
            "be allowed"
        )
    return f"{scheme}://{authority}"


class Guard:
    """Refuses requests to hosts that are not served, and requests of other sites that would change something.

    Args:
        origins: of other sites whose pages may ask all the same.
    """

    def __init__(self, app: ASGIApp, hosts: Hosts, origins: Collection[str] = ()) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            refusal = self._misdirected(headers) or self._other_site(scope["method"], headers)
            if refusal is not None:
                status, detail = refusal
                refused = problem(status, detail, instance=scope["path"], headers={"Connection": "close"})
                await refused(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _misdirected(self, headers: Headers) -> tuple[int, str] | None:
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy may take the one to say where the body ends, and this service the other (request smuggling).
            return 400, "the request has `Content-Length` and `Transfer-Encoding`: send one of them"
        given = headers.get("host")
        if given is None:
            return None  # HTTP/1.0, as a probe may send it: no browser does
        named = _read(given)
        if named is None:
            return 400, f"the `Host` header is {given[:SHOWN_MAX]!r}: send the host of the service's URL"
        if named[0] not in self._hosts:
            name = named[0][:SHOWN_MAX]
            return 421, (
                f"this service does not answer to the host {name!r}: ask it under its own address, or start it with "
                f"`autotuner serve --allow-host {name}` (or AUTOTUNER_ALLOWED_HOSTS={name})"
            )
        return None

    def _other_site(self, method: str, headers: Headers) -> tuple[int, str] | None:
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if (
            origin in self._origins
            or method in SAFE
            or site in ("same-origin", "none")
            or (site is None and origin is None)
        ):
            return None
        if site is None and origin is not None:
            scheme, _, authority = origin.partition("://")
            named = _read(authority)
            if scheme in ("http", "https") and named is not None and named == _read(headers.get("host", "")):
                return None
        said = f"`Origin` is {origin[:SHOWN_MAX]!r}" if origin is not None else f"`Sec-Fetch-Site` is {site!r}"
        return 403, f"{method} from a page of another site is refused ({said}): use a client, or the service's own page"


@lru_cache(KEPT_NAMES)
def _read(authority: str) -> tuple[str, str] | None:
    """Return the name and the port of "name:port"; a port that is the scheme's own is none."""
    match = AUTHORITY.fullmatch(authority.lower())
    if match is None:
        return None
    port = match["port"] or ""
    return _plain(match["literal"] or match["name"]), "" if port in ("80", "443") else port


def _plain(host: str) -> str:
    """Return the one spelling of a host: no dot at its end, an address in its shortest form."""
    host = host.lower().removesuffix(".")
    return str(ip_address(host)) if _is_address(host) else host


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class HeadAsGet:
    """Answers HEAD as GET without its body, so that each route that has GET has HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        over = False

        async def without_body(message: Message) -> None:
            nonlocal over
            if message["type"] == "http.response.start":
                await send(message)
            elif not over:
                over = True  # of a stream, too, which learns from it that nobody listens
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app(dict(scope) | {"method": "GET"}, receive, without_body)
