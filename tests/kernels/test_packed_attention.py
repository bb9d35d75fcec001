"""Attention over packed tokens by Triton programs: in Triton's interpreter, and on a CUDA device."""

from typing import Any

import pytest
import torch

from autotuner.kernels.rules.attention_triton import kept_levels
from autotuner.kernels.torch.packed_attention import kept_weights
from autotuner.runtime.packing.operator import packed_attention
from tests.kernels.calls import faults, interpreted
from tests.kernels.packed_cases import CASES, Case, errors, masks_differ, operands
from tests.kernels.packed_operators import calls_of, packed_graph

TOLERANCES = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}

SETTINGS: list[dict[str, Any]] = [
    {}, {"dropped": 0.25}, {"shared": 2, "dropped": 0.1}, {"cap": 1.5}, {"bias": "nd"},
    {"bias": "dn", "shared": 2, "dropped": 0.25}, {"bias": "nd", "constant": True, "cap": 1.5},
]  # fmt: skip


def operators_of(settings: dict[str, Any]) -> int:
    return 3 if settings.get("bias") and not settings.get("constant") else 2  # forward, backward, and that of the bias


@pytest.mark.slow
def test_programs_compute_what_dense_attention_with_their_mask_does() -> None:
    everything = interpreted("tests.kernels.interpreted_packed")
    assert everything["masks"] == 0
    assert everything["operators"] == {}
    found = everything["errors"]
    assert set(found) == {*CASES, "float16", "float16, bias"}
    for name, of_case in found.items():
        dtype = torch.float16 if name.startswith("float16") else torch.float32
        assert max(of_case.values()) < TOLERANCES[dtype], (name, of_case)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_operators_by_torch_are_those_of_the_reference(dtype: str, settings: dict[str, Any]) -> None:
    calls = calls_of(packed_graph(dtype, **settings), "torch")
    assert len(calls) == operators_of(settings) * 2  # with rows and with heads first
    assert faults(calls) == {}


def test_parts_of_a_mask_are_those_of_the_whole() -> None:
    seed = torch.tensor([-7])
    whole = kept_weights(seed, 3, slice(0, 90), slice(0, 90), 90, kept_levels(0.25))
    assert torch.equal(
        kept_weights(seed, 3, slice(40, 77), slice(33, 85), 90, kept_levels(0.25)), whole[:, 40:77, 33:85]
    )
    assert float(whole.double().mean()) == pytest.approx(0.75, abs=0.01)
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole, kept_weights(seed + 1, 3, slice(0, 90), slice(0, 90), 90, kept_levels(0.25)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_operators_on_a_device_are_those_of_the_reference(dtype: str, settings: dict[str, Any]) -> None:
    calls = calls_of(packed_graph(dtype, rows=700, **settings), "triton")
    assert len(calls) == operators_of(settings) * 2
    assert faults(calls, "cuda") == {}


@pytest.mark.gpu
def test_masks_on_a_device_are_those_on_a_cpu() -> None:
    assert masks_differ(CASES["causal, dropout"], "cuda") == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_programs_on_a_device_do(name: str, dtype: torch.dtype) -> None:
    of_case = errors(CASES[name], dtype, "cuda")
    assert max(of_case.values()) < TOLERANCES[dtype], of_case


@pytest.mark.gpu
@pytest.mark.parametrize("features", [64, 80, 128, 256])
def test_programs_of_every_size_of_head_fit_the_device(features: int) -> None:
    case = Case((300, 1, 700), shared=1, features=features, behind=0, p=0.1)
    for dtype, tolerance in TOLERANCES.items():
        assert max(errors(case, dtype, "cuda").values()) < tolerance


@pytest.mark.gpu
def test_the_operator_can_be_captured_and_draws_another_mask_each_time() -> None:
    case = Case((64, 64), features=64, p=0.5)
    (query, key, value, _), bounds, _ = operands(case, torch.bfloat16, "cuda")
    packed_attention(query, key, value, bounds, case.factor, case.p)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = packed_attention(query, key, value, bounds, case.factor, case.p)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)
    bounds[:, 1] = torch.arange(1, 129, device="cuda")  # the same graph, other bounds
    bounds[:, 0] = torch.arange(128, device="cuda")
    graph.replay()
    is_kept = out != 0
    torch.testing.assert_close(out[is_kept], (2 * value)[is_kept])
