"""Products in 8-bit floats: what they compute, where they are tried, and that others never are."""

from dataclasses import replace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from autotuner.ir.numerics import Numerics
from autotuner.ir.records import Call, Candidate, Node, Subgraph, TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.torch.formats import SMALLEST
from autotuner.kernels.torch.fp8 import LARGEST, rounded, scaled
from autotuner.kernels.triton.fp8 import TILE
from autotuner.kernels.triton.fp8_programs import across_rows, along_rows, largest_across
from autotuner.measure.tolerance import allowed
from autotuner.space import build_space, space_file
from tests.kernels.calls import faults, interpreted, layer, prepare

NAMES = ("fp8_matmul", "fp8_matmul_bias", "fp8_stacked_matmul", "fp8_stacked_matmul_bias")
EXTENTS = {"b": 2, "l": 48, "h": 64, "n": 4, "p": 16, "f": 128}
CUDA = (
    pytest.param("cpu"),
    pytest.param("cuda", marks=pytest.mark.gpu),
)


def calls_of(numerics: Numerics, extents: dict[str, int] = EXTENTS, dtype: str = "bfloat16") -> dict[str, list[Call]]:
    space = build_space(layer(extents, dtype), space_file("cpu"), numerics=numerics)
    return {name: [c.call for c in space.choices if c.candidate.kernel == name] for name in NAMES}


def product(m: int = 32, k: int = 64, n: int = 48) -> Subgraph:
    tensors = tuple(TensorType(shape, "bfloat16") for shape in ((m, k), (k, n), (m, n)))
    return Subgraph((Node("contraction", "ab,bc->ac", (0, 1), (2,)),), tensors, (0, 1), (2,))


@pytest.mark.slow
def test_programs_round_as_torch_does_whichever_way_rows_lie() -> None:
    said = interpreted("tests.kernels.interpreted_fp8")
    assert said["lost"] == {"rows": [True, False], "columns": [False, True]}
    assert len(said["found"]) == 18
    for name, each in said["found"].items():
        assert (each["differ"], each["scales"], each["is_contiguous"]) == (0, 0.0, True), name
        assert each["compared"] > 1000, name


def test_programs_compile_for_hopper() -> None:
    bounds = {"LARGEST": LARGEST, "SMALLEST": SMALLEST}
    tile = {"ROWS": TILE, "COLUMNS": TILE}
    numbers = {"source": "*bf16", "numbers": "*fp8e4nv", "scales": "*fp32", "step": "i32"}
    sizes = {"rows": "i32", "columns": "i32"}
    for program, types, constants in (
        (along_rows, numbers | {"columns": "i32"}, bounds | {"BLOCK": 1024}),
        (largest_across, {"source": "*bf16", "largest": "*i32", "step": "i32"} | sizes, tile),
        (across_rows, numbers | {"largest": "*i32"} | sizes, bounds | tile),
    ):
        source = ASTSource(program, types | dict.fromkeys(constants, "constexpr"), constants)
        text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
        assert ("e4m3x2" in text) is (program is not largest_across)


@pytest.mark.parametrize("device", CUDA)
def test_products_of_a_layer_are_those_of_rounded_operands(device: str) -> None:
    found = calls_of("fp8")
    for name, calls in found.items():
        assert len(calls) >= 4, name
        assert faults(calls, device) == {}, name


def test_a_result_is_verified_more_strictly_than_its_rounding_errs() -> None:
    torch.manual_seed(0)
    call = Call(product(), Candidate("fp8_matmul", ("ab", "ab", "ab")))
    made = prepare(call)
    made.run()
    a, b = (tensor.double() for tensor in made.inputs if tensor is not None)
    left, right = rounded(call.subgraph, [a, b])
    assert left is not None
    assert right is not None
    assert made.outputs[0] is not None
    got = made.outputs[0].double()

    def error(wanted: torch.Tensor) -> float:
        return float((got - wanted).norm() / wanted.norm())

    assert 0.02 < error(a @ b) < 0.06, "operands have 3 bits of mantissa"
    assert error(left @ right) < 0.005, "and sums are rounded once, to bfloat16"
    relative, absolute = allowed(call.subgraph, "bfloat16")
    assert relative + absolute < 0.08


def test_rows_of_zeros_and_rows_of_other_sizes_keep_their_scales() -> None:
    values = torch.tensor([[0.0, 0.0], [1e-3, -5e-4], [3e4, 1.0]])
    numbers, scales = scaled(values, (1,))
    assert scales.tolist() == [[1.0], [pytest.approx(1e-3 / LARGEST)], [pytest.approx(3e4 / LARGEST)]]
    assert torch.allclose(numbers.float() * scales, values, rtol=2**-4, atol=2.0)
    assert (numbers.float() * scales)[:2].allclose(values[:2], rtol=2**-4, atol=0.0)


def test_they_are_tried_where_they_are_allowed_and_for_products_with_weights_alone() -> None:
    assert not any(calls_of("exact").values())
    assert not any(calls_of("8-bit").values())
    space = build_space(layer(EXTENTS, "bfloat16"), space_file("cpu"), numerics="fp8")
    covers = {choice.cover.operators for choice in space.choices if choice.candidate.kernel in NAMES}
    products = {o.name for o in space.graph.operators if o.kind == "contraction" and any(o.name in c for c in covers)}
    of_weights = {
        operator.name for operator in space.graph.operators
        if operator.kind == "contraction" and any(map(space.graph.is_weight, operator.inputs))
    }  # fmt: skip
    gradients = {
        operator.name for operator in space.graph.operators
        if operator.kind == "contraction" and operator.outputs[0] in space.graph.outputs
        and space.graph.tensors[operator.outputs[0]].axes != "blh"
    }  # fmt: skip
    assert products == of_weights
    assert gradients
    assert not products & gradients


@pytest.mark.parametrize(
    "subgraph, why",
    [
        (product(k=40), "40 contracted elements and 48 of a row of the product are no multiples of 16"),
        (product(n=40), "64 contracted elements and 40 of a row of the product are no multiples of 16"),
        (
            replace(product(), tensors=tuple(TensorType(t.extents, "float32") for t in product().tensors)),
            "products in 8-bit floats are made of bfloat16, not of float32",
        ),
    ],
)
def test_what_the_library_does_not_take_is_refused(subgraph: Subgraph, why: str) -> None:
    assert KERNELS["fp8_matmul"].refuses(subgraph, Candidate("fp8_matmul", ("ab", "ab", "ab"))) == why
