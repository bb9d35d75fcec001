"""GELU's gradient from its result and the side of its argument: the slope, the format, what makes and reads it."""

from itertools import permutations

import pytest
import torch
from torch import Tensor

from autotuner.ir.form import Form
from autotuner.ir.records import Call, Candidate, Subgraph, TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.rules.conversion import conversion
from autotuner.kernels.rules.fused import from_result_layouts, fused_layouts
from autotuner.kernels.torch.formats import decoded, encoded
from autotuner.kernels.torch.gelu_slope import APPROXIMATE, FITS, argument_from, is_right, slope
from tests.kernels.calls import ODD, faults, layer, subgraphs

WHOLE = {"b": 2, "l": 3, "h": 8, "n": 2, "p": 4, "f": 16}
KINDS = list(FITS)
READS, WRITES = "inductor_from_result", "inductor"


def gelu(kind: str, x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate=APPROXIMATE[kind])


def gradient(kind: str, x: Tensor, arriving: Tensor | None = None) -> Tensor:
    given = torch.ones_like(x) if arriving is None else arriving
    found: Tensor = torch.ops.aten.gelu_backward(given, x, approximate=APPROXIMATE[kind])
    return found


def covered(kind: str, extents: dict[str, int], kernel: str, dtype: str = "bfloat16") -> list[Subgraph]:
    """Return what a kernel covers of a layer without dropout."""
    graph = layer(extents, dtype, p=0.0, activation=kind)
    return [subgraph for name, subgraph in subgraphs(graph) if name == kernel]


@pytest.mark.parametrize("kind", KINDS)
def test_the_slope_is_that_of_the_argument_everywhere(kind: str) -> None:
    x = torch.linspace(-14, 14, 280_001, dtype=torch.float64)
    error = (slope(kind, gelu(kind, x), is_right(x)) - gradient(kind, x)).abs()
    assert float(error.max()) <= 4e-4
    assert float(error[(x + 0.752).abs() > 1e-2].max()) <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_the_slope_goes_on_to_the_ends_and_behind_no_number(kind: str) -> None:
    x = torch.tensor([float("inf"), 1e30, 0.0, -40.0, -float("inf"), float("nan")])
    found = slope(kind, gelu(kind, x), is_right(x))
    assert found[:2].tolist() == [1.0, 1.0]
    assert found[2:4].tolist() == pytest.approx([0.5, 0.0], abs=1e-4)
    assert found[4:].isnan().all()  # GELU of the least number is none, as the framework has it


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 1.9), (torch.float16, 3.6)])
@pytest.mark.parametrize("kind", KINDS)
def test_of_bfloat16_the_error_is_that_of_the_frameworks_own_rounding(
    kind: str, dtype: torch.dtype, most: float
) -> None:
    x, arriving = torch.randn(2, 1 << 18, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = gradient(kind, x.double(), arriving.double())
    own = (arriving.float() * slope(kind, gelu(kind, x.float()).to(dtype), is_right(x))).to(dtype)
    errors = [float((found.double() - wanted).norm()) for found in (own, gradient(kind, x, arriving))]
    assert 0.8 * most <= errors[0] / errors[1] <= most


@pytest.mark.parametrize("kind", KINDS)
def test_an_argument_is_found_from_its_result(kind: str) -> None:
    x = torch.linspace(-4, 14, 10_001, dtype=torch.float64)
    found = argument_from(kind, gelu(kind, x), is_right(x))
    assert float((gradient(kind, found) - gradient(kind, x)).abs().max()) <= 4e-4
    assert float((gelu(kind, found) - gelu(kind, x)).abs().max()) <= 1e-7


@pytest.mark.parametrize("order", ["".join(order) for order in permutations("abc")])
def test_sides_are_in_memory_order_and_decoded_into_declared_order(order: str) -> None:
    values, form, tensor = torch.randn(3, 5, 7) - 0.75, Form.parse(f"{order}:branch"), TensorType((3, 5, 7), "bfloat16")
    stored = encoded(values, form, tensor)
    assert stored.numel() == 14
    assert torch.equal(decoded(stored, form, tensor, None), (values >= -0.752).bfloat16())


@pytest.mark.slow
def test_packed_sides_equal_the_reference_in_every_order() -> None:
    def packs(shape: tuple[int, ...], order: str) -> Call:
        tensor = TensorType(shape, "bfloat16")
        return Call(conversion(tensor), Candidate("inductor_pack_branches", (order, f"{order}:branch")))

    assert faults([*(packs((3, 5, 7), "".join(o)) for o in permutations("abc")), packs((5,), "a")]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("extents", [ODD, WHOLE], ids=["rows that share bytes", "rows of whole bytes"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_sets_make_sides_and_read_them_beside_the_result(kind: str, extents: dict[str, int]) -> None:
    reading = covered(kind, extents, READS)
    calls = [Call(each, Candidate(READS, next(from_result_layouts(each)))) for each in reading]
    assert (f"{kind}_grad",) in {each.kinds[1:] for each in reading}
    writing = next(each for each in covered(kind, extents, WRITES) if each.kinds == ("bias", kind))
    calls += [
        Call(writing, Candidate(WRITES, row)) for row in fused_layouts(writing)
        if any(text == "abc:branch" for text in row)
    ]  # fmt: skip
    assert len(calls) == len(reading) + 1
    assert faults(calls) == {}


def test_only_results_in_bfloat16_without_dropout_behind_are_read() -> None:
    assert covered("gelu_erf", ODD, READS)
    assert not covered("gelu_erf", ODD, READS, "float32")
    assert not covered("gelu_erf", ODD, READS, "float16")
    assert not covered("relu", ODD, READS)
    graph = layer(ODD, "bfloat16", p=0.25)  # the next product reads what dropout makes
    assert READS not in {name for name, _ in subgraphs(graph)}


def test_a_side_is_read_beside_the_result_alone_and_nothing_but_the_side() -> None:
    reading = covered("gelu_erf", ODD, READS)[0]
    row = next(from_result_layouts(reading))
    assert KERNELS[READS].refuses(reading, Candidate(READS, row)) is None
    raw = tuple(text.removesuffix(":branch") for text in row)
    assert "of GELU's argument it reads the side, and not abc" in str(
        KERNELS[READS].refuses(reading, Candidate(READS, raw))
    )
    assert "by inductor_from_result alone" in str(KERNELS[WRITES].refuses(reading, Candidate(WRITES, row)))
    plain = next(each for each in covered("gelu_erf", ODD, WRITES) if each.kinds[0] == "gelu_erf_grad")
    assert "this one is not read" in str(
        KERNELS[READS].refuses(plain, Candidate(READS, ("abc",) * len(plain.boundary)))
    )
