"""A database that knows the regions of small models, by plans of made-up times."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotuner.api.backend import COMPILED
from autotuner.api.survey import region_calls
from autotuner.database import open_database
from autotuner.measure.devices import environment
from autotuner.plan.request import family_key
from tests.runtime.capture.known import planned
from tests.runtime.capture.test_backend import blocks

OPTIONS: dict[str, Any] = {"compiler": "aot_eager"}
LAYERS = 2


def remember(path: Path, called: Callable[..., Any], batches: Iterable[Any]) -> None:
    """Store a plan for each region in calls."""
    here = environment("cpu")
    with open_database(path) as database:
        database.remember(here)
        for region in region_calls(called, batches).models.values():
            database.configurations.save(
                request_key=region.name, environment_key=here.key, family_key=family_key(region.family),
                dtype=region.dtype, extents=region.extents, complete=True, document=planned(region).to_json(),
                total_us=1.0,
            )  # fmt: skip


class Net(nn.Module):
    """Two blocks, which run tuned, and a head, which does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks(LAYERS)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.layers(x)).square().mean()


def batch(number: int, rows: int = 3) -> Tensor:
    return torch.randn(2, rows, 16, generator=torch.Generator().manual_seed(number))


def use(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the backend read a database."""
    monkeypatch.setenv("AUTOTUNER_DATABASE", str(path))
    monkeypatch.delenv("AUTOTUNER_SERVER", raising=False)
    torch._dynamo.reset()


class Tuned:
    """Counts regions in graphs that were compiled since it was made."""

    def __init__(self) -> None:
        self._begun = len(COMPILED)

    @property
    def places(self) -> int:
        return sum(graph.tuned_places for graph in COMPILED[self._begun :])

    @property
    def graphs(self) -> int:
        return len(COMPILED) - self._begun


def assert_same(found: nn.Module, wanted: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, one), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=name)
