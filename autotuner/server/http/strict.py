"""Strictness: requests that say something which the service would not understand are refused, never half read."""

import json
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from email.message import Message as Header
from functools import cached_property
from math import isfinite
from typing import Any, get_origin
from urllib.parse import unquote_to_bytes

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autotuner.database import Role
from autotuner.server.http.connections import CHECKERS
from autotuner.server.http.guard import SAFE
from autotuner.server.http.problems import Refusal, not_valid, problem
from autotuner.server.wire.requests import Query
from autotuner.server.wire.values import INTEGER_MAX, TEXT_MAX

BODY_MAX_BYTES = 2**20
"""A hundred times a model file of an encoder layer."""

VALUES_MAX = 20_000
"""Above what the largest model has; each one that is not valid takes 50 us and 2 kB to refuse. Counted by commas."""

KEYS_MAX = 1024
"""Of one object: as many as a model may have tensors."""

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class StrictRoute(APIRoute):
    """A route that asks for a token, and refuses queries and bodies which FastAPI would read in part.

    Such are unknown or repeated names, and odd JSON.
    """

    @property
    def role(self) -> Role | None:
        """The role that a client needs; None where everybody may ask."""
        return "submitter" if set(self.methods or ()) - set(SAFE) else "reader"

    @cached_property
    def query_names(self) -> dict[str, bool]:
        """Names that the query may have, and whether each may be repeated."""
        names = {}
        for param in self.dependant.query_params:
            query = param.field_info.annotation
            assert isinstance(query, type)
            assert issubclass(query, Query)
            for name, field in query.model_fields.items():
                names[name] = get_origin(field.annotation) is list
        return names

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            request.state.route = self.path_format
            if self.role is not None:
                request.state.caller = await request.app.state.access.caller(request.scope, self.role)
            if request.scope["query_string"]:
                check_query(request, self.query_names)
            if self.body_field is not None or (request.method not in SAFE and _has_body(request)):
                check_media_type(request)
            if self.body_field is not None:
                request = _Checked(request, *await self._body(request))
            return await handle(request)

        return strict

    async def _body(self, request: Request) -> tuple[bytes, Any]:
        """Return a body and the value that it gives, which a thread makes: that may take long."""
        try:
            body = await request.body()
        except ClientDisconnect:
            raise Refusal(408, "the connection ended before the body did") from None
        return body, await run_sync(self._valid, body, limiter=self._checking) if body else None

    def _valid(self, body: bytes) -> Any:
        """Return the model of a body; FastAPI validates none that is made."""
        try:
            return self._type.validate_python(read_json(body))
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False)
            raise not_valid(found, within=("body",)) from None

    @cached_property
    def _checking(self) -> CapacityLimiter:
        return CapacityLimiter(CHECKERS)

    @cached_property
    def _type(self) -> TypeAdapter[Any]:
        assert self.body_field is not None
        body: Any = self.body_field.field_info.annotation
        return TypeAdapter(body)


class OpenRoute(StrictRoute):
    """A route that everybody may ask, with a token or without: it tells whether the service can answer."""

    @property
    def role(self) -> None:
        return None


def check_query(request: Request, names: Mapping[str, bool]) -> None:
    """Check that a query can be decoded and has only known names, each once unless it may be repeated.

    Raises:
        Refusal: it does not.
    """
    try:
        unquote_to_bytes(request.scope["query_string"]).decode("utf-8")
    except UnicodeDecodeError:
        raise Refusal(422, "the query is no UTF-8: percent-encode the bytes of UTF-8") from None
    seen = set()
    for name, _ in request.query_params.multi_items():
        if name not in names:
            valid = f"valid are {', '.join(names)}" if names else "there are none here"
            raise Refusal(422, f"no parameter {name[:100]!r}: {valid}", errors=[_error(name, "unknown parameter")])
        if name in seen and not names[name]:
            raise Refusal(422, f"parameter {name!r} is given twice: give it once", errors=[_error(name, "given twice")])
        seen.add(name)


def _error(name: str, message: str) -> dict[str, str]:
    return {"field": f"query {name[:100]}", "message": message}


def check_media_type(request: Request) -> None:
    """Check that a body is said to be JSON in UTF-8.

    Raises:
        Refusal: it is not.
    """
    given = request.headers.get("content-type", "")
    header = Header()
    header["content-type"] = given
    charset = str(header.get_param("charset", "utf-8")).lower()
    if not given or header.get_content_type() != "application/json" or charset not in ("utf-8", "utf8"):
        said = repr(given[:100]) if given else "of no media type"
        raise Refusal(415, f"the body is {said}: send JSON with `Content-Type: application/json`")


def _has_body(request: Request) -> bool:
    headers = request.headers
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""


class _Checked(Request):
    """A request whose body was read and validated."""

    def __init__(self, request: Request, body: bytes, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._body = body
        self._value = value

    async def json(self) -> Any:
        return self._value


def read_json(body: bytes) -> Any:
    """Return what a JSON text says. An integer beyond 64 bits becomes the nearest float, as in most readers of JSON.

    Raises:
        Refusal: it is no JSON (NaN and Infinity are none), no UTF-8, too deep, too many values or keys, a key twice,
            a number beyond the range of floats, a text that is too long, or a NUL character, which databases do not
            keep.
    """
    if body.count(b",") > VALUES_MAX:
        raise Refusal(422, f"the body has more than {VALUES_MAX} values, and so more than any job can have")
    try:
        value = json.loads(
            body.decode("utf-8"),
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_float,
            object_pairs_hook=_object,
        )
    except UnicodeDecodeError as error:
        raise Refusal(422, f"the body is no UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise Refusal(422, f"the body is no JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except ValueError as error:
        raise Refusal(422, f"the body cannot be read: {error}") from None
    except RecursionError:
        raise Refusal(422, "the body cannot be read: it is nested too deeply") from None
    return value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number in JSON; leave the field out, or give null")


def _integer(text: str) -> int | float:
    return int(text) if len(text) <= 20 and -INTEGER_MAX <= int(text) <= INTEGER_MAX else _float(text)


def _float(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text[:40]} is beyond the range of floats")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > KEYS_MAX:
        raise ValueError(f"an object has {len(pairs)} keys: give at most {KEYS_MAX}")
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {twice[:100]!r} occurs twice in one object")
    for key, value in pairs:
        texts = [key, *_texts(value)]
        if any("\x00" in text for text in texts):
            raise ValueError(f"there is a NUL character at key {key[:100]!r}")
        longest = max(map(len, texts))
        if longest > TEXT_MAX:
            raise ValueError(f"a text at key {key[:100]!r} has {longest} characters: give at most {TEXT_MAX}")
    return found


def _texts(value: Any) -> Iterator[str]:
    """Yield a text, or those of a list; objects inside were looked into when they were made."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


class BodyLimit:
    """Refuses a body above 1 MiB: by its announced length before it is read, otherwise as soon as so much has come."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if length.isdigit() and int(length[:20]) > BODY_MAX_BYTES:
            # What of the body still comes is not read, so the connection cannot go on.
            refused = problem(413, TOO_LARGE, instance=scope["path"], headers={"Connection": "close"})
            await refused(scope, receive, send)
            return
        got = 0

        async def limited() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > BODY_MAX_BYTES:
                raise Refusal(413, TOO_LARGE, headers={"Connection": "close"})
            return message

        await self._app(scope, limited, send)


TOO_LARGE = f"the body is above {BODY_MAX_BYTES} bytes, and so larger than any job can be"
