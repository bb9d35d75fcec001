"""Attention over packed tokens by Triton programs: in Triton's interpreter, and on a CUDA device."""

from typing import Any

import pytest
import torch

from autotuner.kernels.rules.attention_triton import SHARED_BYTES, kept_levels
from autotuner.kernels.rules.packed_tiles import (
    DEFAULT,
    TILED,
    PackedTile,
    PackedTiles,
    default_tiles,
    shared_bytes,
    unfit_tiles,
)
from autotuner.kernels.torch.packed_attention import kept_weights
from autotuner.runtime.packing.operator import packed_attention
from tests.kernels.calls import faults, interpreted
from tests.kernels.packed_cases import CASES, TILED_CASES, Case, errors, masks_differ, operands
from tests.kernels.packed_operators import calls_of, kinds_of, packed_graph, tuned_calls_of

TOLERANCES = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}

SETTINGS: list[dict[str, Any]] = [
    {}, {"dropped": 0.25}, {"shared": 2, "dropped": 0.1}, {"cap": 1.5}, {"bias": "nd"},
    {"bias": "dn", "shared": 2, "dropped": 0.25}, {"bias": "nd", "constant": True, "cap": 1.5},
]  # fmt: skip


HOPPER = {
    "FEATURES": 128, "WIDTH": 128, "EVEN": True, "GROUP": 1, "CAPS": False, "BIASED": True, "DROPS": True,
    "KEPT": 58982, "STEP": 4, "BITS": 64, "PRECISION": "ieee",
}  # fmt: skip
TYPES = {
    **dict.fromkeys(("query", "key", "value", "out", "gradient", "seed"), "*bf16"),
    **dict.fromkeys(("into_query", "into_key", "into_value"), "*bf16"),
    **dict.fromkeys(("log_sum_exp", "means", "bounds", "seers", "bias"), "*fp32"),
    **dict.fromkeys(("factor", "cap", "kept", "kept_inverse"), "fp32"),
}
"""Types of what programs are given, but for strides and extents."""


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


@pytest.mark.slow
def test_every_tile_that_is_tried_gives_the_same_values_and_the_same_mask() -> None:
    everything = interpreted("tests.kernels.interpreted_packed_tiles")
    assert set(everything["errors"]) == {f"{name}: {number}" for name in TILED_CASES for number in range(3)}
    assert max(everything["errors"].values()) < TOLERANCES[torch.float16], everything["errors"]
    assert everything["faults"] == {}
    assert everything["calls"] == (2 + 4) + (3 + 4 + 1)  # forward, backward, and that of a bias


@pytest.mark.parametrize(
    ("features", "options", "counts"),
    [
        (64, {"dropped": 0.1}, [2, 4]), (64, {}, [2, 2]), (80, {"dropped": 0.1}, [2, 4]), (128, {}, [2, 4]),
        (128, {"bias": "nd", "dropped": 0.1}, [3, 4, 1]), (256, {}, [2, 1]),
    ],
)  # fmt: skip
def test_tiles_are_tried_that_fit_the_head(features: int, options: dict[str, Any], counts: list[int]) -> None:
    graph = packed_graph("bfloat16", features=features, **options)
    assert [len(tuned_calls_of(graph, kind)) for kind in kinds_of(graph)] == counts
    in_float32 = packed_graph("float32", features=features, **options)
    assert [len(tuned_calls_of(in_float32, kind)) for kind in kinds_of(graph)] == [1] * len(counts)


@pytest.mark.parametrize(
    ("element_bytes", "features", "drops", "biased", "texts"),
    [
        (2, 64, True, False, ["64x128x4x2", "64x128x4x2", "32x128x4x2", "64x128x8x1"]),
        (2, 64, False, False, ["64x64x4x3", "64x64x4x3", "32x64x4x2", "64x128x8x1"]),
        (2, 80, True, False, ["64x128x4x2", "64x128x8x2", "32x128x8x2", "64x128x8x1"]),
        (2, 128, False, False, ["64x128x4x2", "64x128x8x2", "32x128x8x2", "64x128x8x1"]),
        (2, 64, False, True, ["64x64x4x2", "64x64x4x2", "32x64x4x2", "64x128x8x1"]),
        (2, 128, True, True, ["64x64x4x2", "64x64x8x2", "32x64x8x2", "64x128x8x1"]),
        (2, 256, True, False, ["32x64x4x1", "32x64x4x1", "16x64x4x1", "32x64x8x1"]),
        (4, 64, True, True, ["32x64x4x1", "32x64x4x1", "16x64x4x1", "32x64x8x1"]),
    ],
)
def test_plans_without_tiles_run_those_that_they_were_measured_with(
    element_bytes: int, features: int, drops: bool, biased: bool, texts: list[str]
) -> None:
    default = default_tiles(features, element_bytes, drops=drops, biased=biased)
    assert default == PackedTiles(*(PackedTile.parse(text) for text in texts))  # type: ignore[arg-type]
    for kind, programs in TILED.items():
        assert default.chosen(kind, {}) == default == default.chosen(kind, dict.fromkeys(programs, DEFAULT))
        assert unfit_tiles(kind, {}, features, element_bytes, drops=drops, biased=biased) is None


@pytest.mark.parametrize(
    ("kind", "params", "reason"),
    [
        ("", {"rows": 64}, "it takes the parameters tile, or none; given: rows"),
        ("_grad", {"query_tile": DEFAULT}, "it takes the parameters query_tile, key_tile, or none; given: query_tile"),
        ("", {"tile": 64}, "tile is default, or rows, keys, warps and stages such as 64x128x4x2; given: 64"),
        ("", {"tile": "64x128x4x2"}, "tile is 64x128x4x2 by default"),
        ("", {"tile": "48x64x4x2"}, "tile 48x64x4x2: rows are 16, 32, 64, 128"),
        ("", {"tile": "64x32x4x2"}, "tile 64x32x4x2: keys are 64, 128"),
        ("", {"tile": "64x64x3x2"}, "tile 64x64x3x2: warps are a power of 2"),
        ("", {"tile": "32x64x8x2"}, "tile 32x64x8x2: a warp computes 8 of the rows or more; 8 share 32"),
        (
            "", {"tile": "128x128x8x4"},
            "tile 128x128x8x4: it takes 294,912 bytes of shared memory; a program has 232,448 at most",
        ),
        (
            "_grad", {"query_tile": DEFAULT, "key_tile": "64x64x16x2"},
            "key_tile 64x64x16x2: a warp computes 8 of the keys or more; 16 share 64",
        ),
        ("_grad_bias", {"tile": "64x64x8x1"}, "tile 64x64x8x1: keys are twice the rows"),
        ("_grad_bias", {"tile": "128x128x8x1"}, "tile 128x128x8x1: rows are 32, 64"),
    ],
)  # fmt: skip
def test_tiles_that_no_program_takes_are_refused_in_a_sentence(
    kind: str, params: dict[str, int | str], reason: str
) -> None:
    assert unfit_tiles(f"packed_attention{kind}", params, 128, 2, drops=True, biased=False) == reason


def test_operands_of_float32_have_default_tiles() -> None:
    reason = "operands of 4 bytes have default tiles; given: 64x64x4x3"
    assert unfit_tiles("packed_attention", {"tile": "64x64x4x3"}, 64, 4, drops=True, biased=False) == reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "text"),
    [("forward", "128x128x8x2"), ("query_gradient", "128x64x8x3"), ("key_value_gradient", "64x128x8x2")],
)
def test_shared_memory_of_a_tile_compiled_for_hopper_is_what_the_rule_counts(program: str, text: str) -> None:
    """With 128 features, dropout and a bias: what takes most."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from autotuner.kernels.triton import packed_attention_program

    source, tile = getattr(packed_attention_program, program), PackedTile.parse(text)
    assert tile is not None
    constants = HOPPER | {"ROWS": tile.rows, "COLUMNS": tile.columns}
    types = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in source.arg_names}
    odd = (*constants, "factor", "cap", "kept", "kept_inverse", "reach", "bias_head", "bias_place")
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(source.arg_names) if name not in odd}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = triton.compile(
        ASTSource(source, types, constants, aligned), target=GPUTarget("cuda", 90, 32), options=options
    )
    name = {"forward": "forward", "query_gradient": "query", "key_value_gradient": "key"}[program]
    counted = shared_bytes(tile, name, 128, 2, biased=True)
    assert counted <= made.metadata.shared <= min(counted + 3072, SHARED_BYTES)


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
@pytest.mark.parametrize("features", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("settings", [{"dropped": 0.1}, {}, {"bias": "nd", "shared": 2, "dropped": 0.25}])
def test_every_tile_that_is_tried_fits_the_device(features: int, settings: dict[str, Any]) -> None:
    graph = packed_graph("bfloat16", rows=700, features=features, **settings)
    assert faults([call for kind in kinds_of(graph) for call in tuned_calls_of(graph, kind)], "cuda") == {}


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
