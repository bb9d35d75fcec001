"""Documentation: the OpenAPI document with its problems and examples, and the page that shows it (Swagger UI)."""

from collections.abc import Mapping
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

from autotuner.server.http.access import Access
from autotuner.server.http.examples import ANSWERS, PROBLEMS
from autotuner.server.http.problems import PROBLEM_JSON
from autotuner.server.http.submissions import Submission
from autotuner.server.wire.responses import ProblemDetails
from autotuner.server.wire.values import TEXT_MAX

TEMPLATE = "#/components/schemas/{model}"
DESCRIPTION = """\
Submit a tuning job, let a worker measure and solve it, and get the best configuration for a model on a device.

1. `POST /v1/jobs` with a model of the service (`GET /v1/models`) or the content of a model file.
2. A worker (`autotuner worker`, with the same database) takes the job. `GET /v1/jobs/{job_id}/events` follows it.
3. `GET /v1/configurations/best` returns the configuration; `autotuner.apply` runs it.

Every error is a problem of RFC 9457 whose `detail` says what was given and what would be valid: 422 for what is not
well formed, 409 for what is well formed and contradicts the model or the state of a job, 404 for what is not there.
Numbers carry their unit in their name; times of day are in UTC.
"""
TAGS = [
    {"name": "jobs", "description": "What is asked for, and how far it is."},
    {"name": "configurations", "description": "Answers, ready to run."},
    {"name": "measurements", "description": "What was measured, where, and what can be measured."},
    {"name": "service", "description": "Whether the service can answer."},
]
MEANINGS: Mapping[int, str] = {
    401: "A token is missing, or is not valid.",
    403: "The token is of a lesser role, or it comes from a page of another site.",
    404: "It is not there.",
    408: "The body did not arrive in time.",
    409: "It is well formed, and contradicts the model or the state of the job.",
    413: "The body is above 1 MiB, or the job above 256 KiB.",
    415: "The body is not said to be JSON.",
    421: "The service does not answer to the host that is named.",
    422: "Something is not well formed.",
    429: "The client has as many waiting jobs or open streams as it may, or has submitted as many bytes in 24 hours.",
    500: "The service failed; its log says why.",
    503: "The database cannot be used now; try again later.",
}


TOKEN: dict[str, Any] = {
    "type": "http",
    "scheme": "bearer",
    "description": "A token, as `autotuner token create` prints it. A `reader` asks, a `submitter` submits jobs and "
    "cancels its own, an `admin` cancels all. A service of one machine answers without, as long as it has no tokens.",
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what a route that needs a token may answer in place of success: these, and what every such route may."""
    return open_refusals(*statuses, 401, 403)


def open_refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what a route that everybody may ask may answer in place of success."""
    return {status: _refusal(status) for status in sorted({*statuses, 421, 422, 500, 503})}


def _refusal(status: int) -> dict[str, Any]:
    value = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status} | PROBLEMS[status]
    schema = {"$ref": TEMPLATE.format(model="Problem")}
    headers = {}
    if status == 401:
        headers = {"WWW-Authenticate": {"description": "`Bearer`.", "schema": {"type": "string"}}}
    if status in (429, 503):
        headers = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
    found = {"description": MEANINGS[status], "content": {PROBLEM_JSON: {"schema": schema, "example": value}}}
    return found | ({"headers": headers} if headers else {})


def describe(app: FastAPI, access: Access) -> None:
    """Have the application give the OpenAPI document with what FastAPI leaves out.

    As long as everybody is answered, a token may be left out, by the document as well.
    """
    documents: dict[bool, dict[str, Any]] = {}

    def openapi() -> dict[str, Any]:
        if access.open not in documents:
            documents[access.open] = _document(app, without_token=access.open)
        return documents[access.open]

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI, *, without_token: bool) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, summary=app.summary, description=app.description, routes=app.routes,
        tags=TAGS,
    )  # fmt: skip
    schemas = document["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Problem"] = ProblemDetails.model_json_schema(ref_template=TEMPLATE)
    for name in ("Submission", *Submission.model_json_schema()["$defs"]):
        _bound(schemas[name])
    document["components"]["securitySchemes"] = {"token": TOKEN}
    for operation in (operation for path in document["paths"].values() for operation in path.values()):
        if "401" in operation["responses"]:
            operation["security"] = [{"token": []}, *([{}] if without_token else [])]
        for status, response in operation["responses"].items():
            if status.startswith("2") and "application/json" in response.get("content", {}):
                # Here, and not with the route: FastAPI drops what is null from the examples that it is given.
                response["content"]["application/json"] |= ANSWERS[operation["operationId"]]
    return document


def _bound(schema: Any) -> None:
    """Say of every text how long it is at most and that it has no NUL, of every mapping that it has no other keys."""
    if isinstance(schema, list):
        for item in schema:
            _bound(item)
    elif isinstance(schema, dict):
        if schema.get("type") == "string" and not schema.keys() & {"enum", "const"}:
            schema.setdefault("maxLength", TEXT_MAX)
            schema.setdefault("pattern", r"^[^\x00]*$")
        if "patternProperties" in schema:
            schema["additionalProperties"] = False
        for part, value in schema.items():
            if part not in ("default", "examples", "const", "enum"):
                _bound(value)


ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'"
)
KEPT = {"Cache-Control": "public, max-age=86400", "X-Content-Type-Options": "nosniff"}


def documentation_routes(title: str) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/docs")
    def page() -> Response:
        found = get_swagger_ui_html(
            openapi_url="openapi.json",
            title=title,
            swagger_js_url="docs/swagger-ui-bundle.js",
            swagger_css_url="docs/swagger-ui.css",
            swagger_favicon_url="data:,",
            swagger_ui_parameters={"validatorUrl": None},  # which would send the document to another host
        )
        found.headers["Content-Security-Policy"] = POLICY
        return found

    for name, media_type in ASSETS.items():
        _asset(routes, name, media_type)
    return routes


def _asset(routes: APIRouter, name: str, media_type: str) -> None:
    @routes.get(f"/docs/{name}", name=name)
    def asset() -> Response:
        found = files("fastapi_offline").joinpath("static", name)
        return Response(found.read_bytes(), headers=KEPT, media_type=media_type)
