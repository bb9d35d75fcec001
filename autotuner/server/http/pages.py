"""Pages for people: static files that ask the API by themselves, with the token of who looks."""

from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated

from fastapi import APIRouter, Header
from starlette.responses import Response

from autotuner.server.http.answers import ALWAYS_ASK, TaggedBody, names
from autotuner.server.http.strict import OpenRoute

FOLDER = "static"
INDEX = "index.html"
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
"""By the end of a file's name; no other files are served."""

PAGES_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; worker-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SAFETY = {
    "Content-Security-Policy": PAGES_POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes() -> APIRouter:
    """Return routes of the index at / and of the files below /pages/; everybody may ask, as they tell nothing."""
    routes = APIRouter(include_in_schema=False, route_class=OpenRoute)
    for name, path in _found(files("autotuner.server.http").joinpath(FOLDER), ""):
        _file(routes, "/" if name == INDEX else f"/pages/{name}", name, path.read_bytes())
    return routes


def _found(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    """Return the files that are served, each with its path from the folder."""
    found = []
    for each in sorted(folder.iterdir(), key=lambda each: each.name):
        if each.is_dir():
            found += _found(each, f"{prefix}{each.name}/")
        elif each.name.rpartition(".")[2] in MEDIA_TYPES:
            found.append((prefix + each.name, each))
    return found


def _file(routes: APIRouter, path: str, name: str, content: bytes) -> None:
    kept = TaggedBody(f'"{sha256(content).hexdigest()[:32]}"', content)
    headers = {**SAFETY, "ETag": kept.tag, "Cache-Control": ALWAYS_ASK}
    media_type = MEDIA_TYPES[name.rpartition(".")[2]]

    @routes.get(path, name=name)
    async def page(if_none_match: Annotated[str | None, Header()] = None) -> Response:
        if if_none_match is not None and names(if_none_match, kept.tag):
            return Response(status_code=304, headers=headers)
        return Response(kept.body, headers=headers, media_type=media_type)
