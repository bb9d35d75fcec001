"""Attention over packed tokens by Triton programs: in Triton's interpreter, and on a CUDA device."""

import pytest
import torch

from autotuner.runtime.packing.operator import packed_attention
from tests.kernels.calls import interpreted
from tests.kernels.packed_cases import CASES, Case, errors, operands

TOLERANCES = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.slow
def test_programs_compute_what_dense_attention_with_their_mask_does() -> None:
    found = interpreted("tests.kernels.interpreted_packed")
    assert set(found) == {*CASES, "float16"}
    for name, of_case in found.items():
        dtype = torch.float16 if name == "float16" else torch.float32
        assert max(of_case.values()) < TOLERANCES[dtype], (name, of_case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_programs_on_a_device_do(name: str, dtype: torch.dtype) -> None:
    of_case = errors(CASES[name], dtype, "cuda")
    assert max(of_case.values()) < TOLERANCES[dtype], of_case


@pytest.mark.gpu
@pytest.mark.parametrize("features", [64, 80, 128, 256])
def test_programs_of_every_size_of_head_fit_the_device(features: int) -> None:
    case = Case((300, 1, 700), shared=2, features=features, behind=0, p=0.1)
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
