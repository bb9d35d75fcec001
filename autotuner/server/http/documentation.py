"""The page that describes the API to people: Swagger UI, with nothing that comes from another host."""

from importlib.resources import files

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import RedirectResponse, Response

ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'"
)
KEPT = {"Cache-Control": "public, max-age=86400", "X-Content-Type-Options": "nosniff"}


def documentation_routes(title: str) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    def index() -> RedirectResponse:
        return RedirectResponse("/docs")

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
