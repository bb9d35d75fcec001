"""Problems: every error as problem details (RFC 9457), which say what was given and what would be valid."""

import json
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from autotuner.errors import AutotunerError, DatabaseError, InputError, JobStateError, NotFoundError

PROBLEM_JSON = "application/problem+json"
DETAIL_MAX = 2000
GIVEN_MAX = 80
NAMED_MAX = 3
LISTED_MAX = 100
FIELD_MAX = 200
RETRY_AFTER_S = 5
METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")

Fields = Sequence[Mapping[str, Any]]
log = logging.getLogger("autotuner.server.http")


class Refusal(HTTPException):
    """A request that is refused, with its status and the sentence that says why."""

    def __init__(
        self, status: int, detail: str, *, errors: Fields | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, detail, headers)
        self.errors = errors


def problem(
    status: int,
    detail: str,
    *,
    instance: str | None = None,
    errors: Fields | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a response that describes a problem.

    Args:
        instance: path of the request; None where it has none.
        errors: a `field` and a `message` for each field that is not valid.
    """
    detail = detail if len(detail) <= DETAIL_MAX else detail[: DETAIL_MAX - 4] + " ..."
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    body |= ({"instance": instance} if instance is not None else {}) | ({"errors": list(errors)} if errors else {})
    # A character that UTF-8 does not have leaves as an escape.
    return Response(json.dumps(body), status, headers, PROBLEM_JSON)


def handle_problems(app: FastAPI) -> None:
    """Have every error that leaves a route, or finds none, answered by problem details."""
    app.add_exception_handler(RequestValidationError, _not_valid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(AutotunerError, _explained)
    app.add_exception_handler(Exception, _unexpected)


async def _not_valid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await _refused(request, not_valid(error.errors()))


def not_valid(found: Fields, *, within: tuple[str, ...] = ()) -> Refusal:
    """Return the refusal of what Pydantic found not valid: three errors in its sentence, a hundred in its list.

    Args:
        within: where in a request all of it is.
    """
    errors = [{"field": _place((*within, *e["loc"])), "message": _message(e)} for e in found[:LISTED_MAX]]
    named = "; ".join(f"{e['field']}: {e['message']}" for e in errors[:NAMED_MAX])
    more = f"; and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
    # What Pydantic calls a value error is a rule of ours about a whole whose every field is well formed.
    status = 409 if all(e["type"] == "value_error" for e in found) else 422
    return Refusal(status, named + more, errors=errors)


def _place(location: Sequence[int | str]) -> str:
    """Return a field's name with its place: "extents.l" in a body, "query limit" elsewhere."""
    first, *rest = [str(part) for part in location if part not in ("reference", "file")]
    where = ".".join(rest)
    where = where if len(where) <= FIELD_MAX else where[:FIELD_MAX] + "..."
    if first == "body":
        return where or "the body"
    return f"{first} {where}".strip()


def _message(error: Mapping[str, Any]) -> str:
    if error["type"] in ("missing", "extra_forbidden"):
        return "it is missing" if error["type"] == "missing" else "there is no such field"
    text = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    if isinstance(error.get("input"), str | int | float | bool | None):
        given = repr(error.get("input"))
        text += f", not {given if len(given) <= GIVEN_MAX else given[:GIVEN_MAX] + '...'}"
    return text


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, headers = request.url.path, dict(error.headers or {})
    if isinstance(error, Refusal):
        return problem(error.status_code, error.detail, instance=path, errors=error.errors, headers=headers)
    if error.status_code == 404:
        return problem(404, f"there is nothing at {path}: /docs lists what there is", instance=path)
    if error.status_code == 405:
        allowed = ", ".join(_allowed(request))
        detail = f"{request.method} is not possible at {path}: only {allowed}"
        return problem(405, detail, instance=path, headers={"Allow": allowed})
    return problem(error.status_code, str(error.detail), instance=path, headers=headers)


def _allowed(request: Request) -> list[str]:
    """Return the methods of all routes of a path; the one that refused knows only its own. HEAD is wherever GET is."""
    routes = request.app.router.routes
    found = {
        method
        for method in METHODS
        if any(route.matches(dict(request.scope) | {"method": method})[0] is Match.FULL for route in routes)
    }
    return sorted(found | ({"HEAD"} if "GET" in found else set()))


async def _explained(request: Request, error: Exception) -> Response:
    path = request.url.path
    if isinstance(error, NotFoundError):
        return problem(404, str(error), instance=path)
    if isinstance(error, JobStateError | InputError):
        return problem(409, str(error), instance=path)
    if isinstance(error, DatabaseError):
        # The sentence names files and hosts of the service, which are nobody else's business.
        log.error("database_failed", extra={"facts": {"path": path, "error": str(error)}})
        detail = "the database of the service cannot be used now; its log says why: try again later"
        return problem(503, detail, instance=path, headers={"Retry-After": str(RETRY_AFTER_S)})
    return await _unexpected(request, error)


async def _unexpected(request: Request, error: Exception) -> Response:
    facts = {"path": request.url.path, "error": f"{type(error).__name__}: {error}"}
    log.error("failed", extra={"facts": facts}, exc_info=error)
    return problem(500, "the service failed; its log says why", instance=request.url.path)
