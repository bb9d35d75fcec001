"""A service that tunes while a model trains: jobs, the next compilation, and a service that is away."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotuner.api import knowledge
from autotuner.api.backend import COMPILED
from autotuner.errors import ServiceError
from autotuner.ir.models.schema import parse_definition
from tests.ecosystem.known import LAYERS, Net, batch
from tests.runtime.capture.known import planned

pytestmark = pytest.mark.slow


class Service:
    """Stands for a client: it knows nothing at first, and everything once it is `done`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.done = self.away = False
        self.asked = 0
        self.jobs: list[dict[str, Any]] = []

    def best(self, definition: dict[str, Any], **given: Any) -> Any:
        self.asked += 1
        if self.away:
            raise ServiceError("nobody answers", passing=True)
        if not self.done:
            return SimpleNamespace(best=None, match="none")
        from autotuner.ir.models.model import ModelFile

        file = ModelFile("a job", parse_definition(definition, "a job"))
        model = file.instantiate(None, extents=given["extents"], options={}, dtype=given["dtype"])
        return SimpleNamespace(best=SimpleNamespace(configuration=planned(model).to_json()), match="exact")

    def submit(self, definition: dict[str, Any], **given: Any) -> Any:
        self.jobs.append({"definition": definition, **given})
        return SimpleNamespace(id=len(self.jobs))


def compiled(model: Any, service: Service) -> Any:
    torch._dynamo.reset()
    options: Any = {"server": service, "compiler": "eager"}
    return torch.compile(model, backend="autotuner", options=options, dynamic=False)


def test_the_next_compilation_of_the_process_runs_what_was_tuned_meanwhile() -> None:
    model, service = Net(), Service("http://one")
    called = compiled(model, service)
    before = called(batch(0))
    called(batch(0, rows=4))
    called(batch(1))
    assert [job["extents"]["b"] for job in service.jobs] == [2, 2]
    assert COMPILED[-2].headline.endswith("for the others, http://one tunes them (job 1)")
    service.done = True
    torch.testing.assert_close(called(batch(0)), before)
    assert COMPILED[-1].tuned_places == 0
    torch.compiler.reset()
    torch.testing.assert_close(called(batch(0)), before)
    assert COMPILED[-1].tuned_places == LAYERS
    assert len(service.jobs) == 2


def test_a_model_that_is_compiled_twice_is_submitted_once() -> None:
    service = Service("http://two")
    for _ in range(2):
        compiled(Net(), service)(batch(0))
    assert len(service.jobs) == 1


def test_a_service_that_is_away_is_asked_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(knowledge, "monotonic", lambda: now[0])
    service = Service("http://three")
    service.away = True
    called = compiled(Net(), service)
    called(batch(0))
    called(batch(0, rows=4))
    assert service.asked == 1
    assert "did not answer a moment ago" in str(COMPILED[-1])
    now[0] += 61
    service.away = False
    called(batch(0, rows=5))
    assert len(service.jobs) == 1


def test_a_dead_address_holds_up_no_training() -> None:
    begun = time.monotonic()
    compiled(Net(), "http://127.0.0.1:9")(batch(0)).backward()  # type: ignore[arg-type]
    assert time.monotonic() - begun < 30
    assert "http://127.0.0.1:9" in str(COMPILED[-1])
