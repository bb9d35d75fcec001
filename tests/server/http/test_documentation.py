"""The page for people: whole, and without anything from another host."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urljoin

import pytest
from starlette.testclient import TestClient

LOADS = {"src", "href", "srcset", "data", "action", "poster"}


class Loaded(HTMLParser):
    """What a page loads or leads to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self.found += [value for name, value in attrs if name in LOADS and value]


def test_the_page_of_the_api_is_whole_without_a_network(asked: TestClient) -> None:
    page = asked.get("/docs")
    assert page.status_code == 200
    loaded = Loaded(page.text).found
    assert len(loaded) >= 2, "a script and a sheet of styles"
    for url in loaded:
        assert not re.match(r"([a-z]+:)?//", url, re.IGNORECASE), url
        if not url.startswith("data:"):
            part = asked.get(urljoin("/docs", url))
            assert part.status_code == 200
            assert part.headers["Content-Type"].startswith(("text/javascript", "text/css"))
            assert len(part.content) > 1000
    (document,) = re.findall(r"url: '([^']+)'", page.text)
    assert asked.get(urljoin("/docs", document)).json()["openapi"]


def test_no_page_that_is_served_refers_to_another_host(asked: TestClient) -> None:
    pages = 0
    for path in ("/", "/docs", "/redoc", "/docs/oauth2-redirect", "/healthz", "/nowhere"):
        response = asked.get(path)
        if response.headers.get("Content-Type", "").startswith("text/html"):
            pages += 1
            assert not re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+", response.text)
    assert pages == 2


def test_a_browser_is_told_to_load_nothing_from_elsewhere_and_to_frame_it_nowhere(asked: TestClient) -> None:
    policy = asked.get("/docs").headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "http" not in policy
    assert '"validatorUrl": null' in asked.get("/docs").text, "Swagger UI would send the document to be judged"


def test_the_sheet_of_styles_loads_nothing_from_elsewhere(asked: TestClient) -> None:
    sheet = asked.get("/docs/swagger-ui.css").text
    assert not re.findall(r"(?:url\(|@import)\s*['\"]?\s*(?:https?:)?//", sheet)


@pytest.fixture
def parameters(asked: TestClient) -> list[tuple[str, dict[str, Any]]]:
    return list(_parameters(asked.get("/openapi.json").json()))


def _parameters(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            yield from ((f"{path} {each['name']}", each) for each in operation.get("parameters", ()))


def test_every_parameter_says_what_it_is(parameters: list[tuple[str, dict[str, Any]]]) -> None:
    assert len([1 for _, each in parameters if each["in"] == "query"]) == 24
    assert [where for where, each in parameters if not each.get("description", "").endswith(".")] == []
