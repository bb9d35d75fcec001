"""The files of the pages: whole, safe, cached, and without anything from another host."""

import re
from importlib.resources import files

import pytest
from starlette.testclient import TestClient

from autotuner.database import Database
from autotuner.server.http import create_app

STATIC = files("autotuner.server.http").joinpath("static")
OWN = sorted(path.name for path in STATIC.iterdir() if path.is_file() and path.name != "index.html")
VENDOR = sorted(f"vendor/{path.name}" for path in STATIC.joinpath("vendor").iterdir())


def test_people_land_at_a_page_that_names_only_files_that_are_served(asked: TestClient) -> None:
    page = asked.get("/")
    assert page.status_code == 200
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:src|href)="(pages/[^"]+)"', page.text)
    assert len(named) >= 4
    assert {asked.get(f"/{name}").status_code for name in named} == {200}


@pytest.mark.parametrize("name", ["", *(f"pages/{name}" for name in (*OWN, *VENDOR))])
def test_every_file_is_served_with_a_policy_and_sent_once(asked: TestClient, name: str) -> None:
    found = asked.get(f"/{name}")
    assert found.status_code == 200
    assert found.content
    policy = dict(part.split(" ", 1) for part in found.headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in found.headers["Content-Security-Policy"]
    assert found.headers["X-Content-Type-Options"] == "nosniff"
    assert found.headers["Cache-Control"] == "no-cache"
    again = asked.get(f"/{name}", headers={"If-None-Match": found.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_what_is_no_file_of_the_pages_is_not_served(asked: TestClient) -> None:
    for path in ("/pages/", "/pages/index.html", "/pages/../pages.py", "/pages/nothing.js", "/static/app.js"):
        assert asked.get(path).status_code == 404


@pytest.mark.parametrize("name", ["index.html", *OWN])
def test_no_file_of_ours_names_another_host_or_has_a_script_or_style_inside(name: str) -> None:
    text = STATIC.joinpath(name).read_text()
    urls = re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z0-9./-]+", text)
    assert {url for url in urls if url != "http://www.w3.org/2000/svg"} == set()
    assert not re.search(r"\binnerHTML\b|\beval\(|new Function|\.write\(", text)
    if name.endswith(".html"):
        assert not re.search(r"<style|\bstyle=|\son[a-z]+=|<script>", text)


def test_every_library_has_its_licence_beside_it() -> None:
    libraries = [name for name in VENDOR if name.endswith(".js")]
    told = STATIC.joinpath("vendor", "README.txt").read_text()
    for name in libraries:
        licence = STATIC.joinpath(name.replace(".js", ".LICENSE.txt")).read_text()
        assert "Permission is hereby granted, free of charge" in licence
        assert name.removeprefix("vendor/") in told
    assert len(libraries) == 3


def test_modules_import_only_modules_that_are_there() -> None:
    for name in OWN:
        if name.endswith(".js"):
            for imported in re.findall(r'from "\./([^"]+)"', STATIC.joinpath(name).read_text()):
                assert imported in OWN


def test_pages_need_no_token_and_tell_nothing_of_the_database(database: Database) -> None:
    database.tokens.create("", "reader")
    with TestClient(create_app(database, local=False), "http://localhost") as asked:
        assert asked.get("/").status_code == 200
        assert asked.get("/pages/app.js").status_code == 200
        assert asked.get("/v1/caller").status_code == 401
