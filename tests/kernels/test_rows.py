"""Fused sets by rows and masks of bits: rules, and the kernels' own text run on a host."""

from pathlib import Path

import pytest

from autotuner.ir.records import Call, Candidate, Subgraph
from autotuner.kernels import KERNELS
from autotuner.kernels.rules.rows import FUSED, Rows, as_rows, rows_layouts
from autotuner.space import space_file
from autotuner.space.fusion import covers
from tests.kernels.calls import faults, layer
from tests.kernels.host_cuda import on_host

EXTENTS = {"b": 2, "l": 5, "h": 48, "n": 3, "p": 16, "f": 80}
ODD = {"b": 3, "l": 5, "h": 6, "n": 2, "p": 3, "f": 7}
LAUNCHES = (
    {"threads": 32, "rows": 2, "vector": 8, "blocks": 1, "unroll": 1},
    {"threads": 64, "rows": 2, "vector": 1, "blocks": 2, "unroll": 2},
)


@pytest.fixture(autouse=True)
def _on_host(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    compiled, multiprocessors = on_host(_folder(tmp_path_factory))
    for module in ("rows", "bits"):
        monkeypatch.setattr(f"autotuner.kernels.cupy.{module}.compiled", compiled)
    monkeypatch.setattr("autotuner.kernels.cupy.rows.multiprocessors", multiprocessors)


def _folder(factory: pytest.TempPathFactory) -> Path:
    folder = factory.getbasetemp() / "host_cuda"
    folder.mkdir(exist_ok=True)
    return folder


def sets(extents: dict[str, int], dtype: str, **options: object) -> dict[tuple[str, ...], Subgraph]:
    """Return what the kernels by rows cover in a layer, by kinds."""
    graph = layer(extents, dtype, **options)  # type: ignore[arg-type]
    named = {operator.name: operator for operator in graph.operators}
    found = {}
    file = space_file("cuda")
    for cover in covers(graph, tuple(file.kernels), file.max_operators):
        if "cupy_rows" in cover.kernels:
            subgraph = graph.subgraph([named[name] for name in cover.operators], cover.inputs, cover.outputs)
            if max(len(t.extents) for t in subgraph.tensors) < 4:
                found[subgraph.kinds] = subgraph
    return found


def calls(extents: dict[str, int], dtype: str, launch: dict[str, int], **options: object) -> list[Call]:
    found = []
    for subgraph in sets(extents, dtype, **options).values():
        for forms in rows_layouts(subgraph):
            candidate = Candidate("cupy_rows", forms, tuple(launch.items()))
            if KERNELS["cupy_rows"].refuses(subgraph, candidate) is None:
                found.append(Call(subgraph, candidate))
                break
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("launch", LAUNCHES, ids=["vectors", "elements"])
def test_every_set_of_a_layer_equals_the_reference(dtype: str, launch: dict[str, int]) -> None:
    found = calls(EXTENTS, dtype, launch)
    assert len(found) > 12
    assert faults(found) == {}
