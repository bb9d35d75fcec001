"""Messages between clients and the service: its OpenAPI document, and the requests that the client sends.

See `tests.frozen.golden` for how a golden value is written anew.
"""

import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2

from autotuner.database import open_database
from autotuner.errors import ServiceError
from autotuner.ir.models import named_model
from autotuner.plan.request import Request
from autotuner.server.client import Client
from autotuner.server.http import create_app
from autotuner.settings import Limits, TuneOptions
from tests.frozen.golden import assert_same, golden, write_golden
from tests.made_up import FEED_FORWARD


def document(folder: Path) -> dict[str, Any]:
    """Return the OpenAPI document, but for the number of the version."""
    with open_database(folder / "service.sqlite") as database:
        found: dict[str, Any] = create_app(database).openapi()
    del found["info"]["version"]
    return found


def sent(folder: Path) -> list[dict[str, Any]]:
    """Return method, path, query, some headers and the body of each request that a client sends."""
    found = []

    def carry(request: httpx2.Request) -> httpx2.Response:
        body = request.read()
        headers = {name: request.headers.get(name) for name in ("accept", "content-type", "user-agent")}
        found.append({
            "method": request.method, "path": request.url.path, "query": sorted(request.url.params.multi_items()),
            "headers": headers, "body": json.loads(body) if body else None,
        })  # fmt: skip
        return httpx2.Response(500)

    path = folder / "feed_forward.yaml"
    path.write_text(FEED_FORWARD)
    everything: dict[str, Any] = {
        "preset": "tiny", "extents": {"b": 2}, "options": {"activation": "relu"}, "dtype": "float64", "device": "cuda",
        "device_name": "NVIDIA H200",
    }  # fmt: skip
    effort: dict[str, Any] = {
        "gap": 0.05, "estimated_gap": 0.1, "budget_bytes": 1 << 30, "exhaustive": True, "max_seconds": 60.5,
        "max_measurements": 7, "again": True, "retry": True, "remeasure": True, "end_to_end": False,
    }  # fmt: skip
    filters: dict[str, Any] = {"environment_key": "e0" * 32, "device_type": "cpu", "signature": "51" * 32,
                               "kernel": "k", "kinds": "bias+gelu_erf", "status": "ok"}  # fmt: skip
    with Client("http://127.0.0.1:8000", retries=0, transport=httpx2.MockTransport(carry)) as client:
        for ask in (
            lambda: client.submit("bert-encoder:tiny"),
            lambda: client.submit("bert-encoder", **everything, **effort),
            lambda: client.submit(f"{path}:small"),
            lambda: client.submit({"version": 1, "name": "as it is"}, preset="small"),
            lambda: list(client.jobs()),
            lambda: list(client.jobs(state="running", limit=3)),
            lambda: client.job(3),
            lambda: client.cancel(3),
            lambda: client.best("bert-encoder:tiny"),
            lambda: client.best("bert-encoder", **everything, budget_bytes=1 << 30),
            lambda: client.best(f"{path}:small"),
            lambda: client.best(family="0123456789abcdef" * 4, extents={"b": 2}, dtype="float32"),
            lambda: client.configuration(5),
            lambda: client.explain_operator(5, "a/b"),
            lambda: client.explain_tensor(5, "t"),
            lambda: list(client.measurements()),
            lambda: list(client.measurements(**filters, limit=10)),
            lambda: client.statistics(kernel="k"),
            client.devices,
            client.models,
            client.health,
        ):
            with suppress(ServiceError):
                ask()
    return found


def stored_request() -> dict[str, Any]:
    """Return a request as a job holds it in the database."""
    return Request(
        named_model("gpt-block:tiny"), "cuda", "NVIDIA H200",
        TuneOptions(0.05, 0.1, 1 << 30, True, Limits(60.5, 7), True, True, True, False),
    ).to_json()  # fmt: skip


def write() -> None:
    """Write the golden values of this module anew."""
    with TemporaryDirectory() as folder:
        write_golden("openapi.json", document(Path(folder)))
        write_golden("sent.json", sent(Path(folder)))
    write_golden("request.json", stored_request())


def test_the_openapi_document_is_what_it_was(tmp_path: Path) -> None:
    assert_same(document(tmp_path), golden("openapi.json"))


def test_a_client_sends_what_it_sent(tmp_path: Path) -> None:
    assert_same(sent(tmp_path), golden("sent.json"))


def test_a_request_is_stored_as_it_was_and_read_again() -> None:
    assert_same(stored_request(), golden("request.json"))
    assert Request.from_json(golden("request.json")).to_json() == golden("request.json")
