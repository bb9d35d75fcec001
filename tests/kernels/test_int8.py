"""8-bit integers with a scale for each group: what they stand for, how far off, which tensors, made by conversions."""

from itertools import permutations

import pytest
import torch

from autotuner.errors import KernelError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.form import Form
from autotuner.ir.formats import GROUP, LARGEST, SCALE_BYTES
from autotuner.ir.models import load_model, named_model
from autotuner.ir.records import Call, Candidate, TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.rules.conversion import conversion, conversion_of, may_have
from autotuner.kernels.torch.formats import SMALLEST, decoded, encoded
from autotuner.measure.verification import References, fault
from tests.kernels.calls import faults, prepare

ROUNDING = {"float64": 2.0**-22, "float32": 2.0**-22, "bfloat16": 2.0**-8, "float16": 2.0**-10}
"""Of an element: what a scale in float32 and the element type round, beside the 8 bits."""


def to_and_from(shape: tuple[int, ...], order: str, dtype: str = "float32") -> list[Call]:
    subgraph, narrow = conversion(TensorType(shape, dtype)), f"{order}:int8"
    return [
        Call(subgraph, Candidate("inductor_quantize", (order, narrow))),
        Call(subgraph, Candidate("inductor_dequantize", (narrow, order))),
    ]


def after(values: torch.Tensor, order: str) -> torch.Tensor:
    """Return what is left of values that were stored."""
    tensor = TensorType(tuple(values.shape), str(values.dtype).removeprefix("torch."))
    form = Form.parse(f"{order}:int8")
    return decoded(encoded(values, form, tensor), form, tensor, None)


def largest_of_groups(values: torch.Tensor, order: str) -> torch.Tensor:
    """Return for each element the largest of its group, groups being counted in memory order."""
    axes = "abcdef"[: values.dim()]
    lies = values.permute([axes.index(axis) for axis in order]).contiguous()
    groups = torch.nn.functional.pad(lies.view(-1), (0, -lies.numel() % GROUP)).view(-1, GROUP).abs()
    line = groups.amax(1, keepdim=True).expand(groups.shape).reshape(-1)[: lies.numel()]
    return line.view(lies.shape).permute([order.index(axis) for axis in axes])


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("order", ["".join(order) for order in permutations("abc")])
def test_an_element_is_off_by_half_a_step_of_its_group_at_most(order: str, dtype: str) -> None:
    values = torch.randn(3, 50, 7, dtype=torch.float64).mul(torch.logspace(-6, 3, 50, dtype=torch.float64)[:, None])
    values = values.to(getattr(torch, dtype))
    wide, read = values.double(), after(values, order).double()
    allowed = largest_of_groups(wide, order) / (2 * LARGEST) + ROUNDING[dtype] * wide.abs()
    allowed += 2.0**-24 * (dtype == "float16")  # the least step of float16
    assert bool(((read - wide).abs() <= 1.0001 * allowed).all())
    assert after(values, order).dtype == values.dtype


def test_rounding_to_nearest_has_a_third_of_the_error_of_a_step_and_hardly_a_mean() -> None:
    values = torch.randn(1 << 18, dtype=torch.float64)
    off = after(values, "a") - values
    step = largest_of_groups(values, "a") / LARGEST
    assert float((off / step).square().mean()) == pytest.approx(1 / 12, rel=0.02)
    assert abs(float((off / step).mean())) < 4 * (1 / 12 / len(values)) ** 0.5
    assert 0.006 < float(off.norm() / values.norm()) < 0.007


def test_zeros_stay_zeros_and_the_largest_of_a_group_what_it_was() -> None:
    values = torch.randn(2 * GROUP)
    values[::2] = 0
    values[3], values[GROUP + 5] = 127.0, -254.0
    read = after(values, "a")
    assert not read[::2].any()
    assert [float(read[3]), float(read[GROUP + 5])] == [127.0, -254.0]
    assert not after(torch.zeros(GROUP + 1), "a").any()
    tiny = torch.full((GROUP,), SMALLEST / 2)
    assert not after(tiny, "a").any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_spoils_its_group_alone(bad: float) -> None:
    values = torch.randn(3 * GROUP)
    values[GROUP + 7] = bad
    read = after(values, "a")
    assert not read[GROUP : 2 * GROUP].isfinite().any()
    assert read[:GROUP].isfinite().all()
    assert read[2 * GROUP :].isfinite().all()


@pytest.mark.parametrize("dtype, share", [("bfloat16", 0.516), ("float32", 0.258)])
def test_they_take_half_of_16_bits_and_a_scale_for_each_group(dtype: str, share: float) -> None:
    form, shape = Form.parse("ba:int8"), (64, 768)
    stored, raw = form.stored(dtype, "ab", shape), Form.parse("ba").stored(dtype, "ab", shape)
    assert stored.length == 64 * 768 // GROUP * (GROUP + SCALE_BYTES)
    assert stored.length / (raw.length * (2 if dtype == "bfloat16" else 4)) == pytest.approx(share, abs=1e-3)
    assert form.stored(dtype, "ab", (3, 5)).length == GROUP + SCALE_BYTES
    assert str(form) == "ba:int8"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_conversions_equal_the_reference(dtype: str) -> None:
    # 10,500 elements: whole groups, and one that is filled up. Five: no whole group. 512: nothing over.
    calls = [
        *to_and_from((3, 50, 70), "acb", dtype),
        *to_and_from((5,), "a", dtype),
        *to_and_from((8, 64), "ba", dtype),
    ]
    assert faults(calls) == {}


def test_a_number_or_scale_that_is_wrong_is_found() -> None:
    call = to_and_from((2, GROUP), "ab")[0]
    made = prepare(call)
    (stored,) = made.outputs
    assert stored is not None
    right = encoded(made.values.inputs[0], Form.parse("ab:int8"), call.subgraph.tensors[0])

    def changed(place: int, by: int) -> str | None:
        def run() -> None:
            stored.copy_(right)
            stored[place] ^= by

        return fault(call, KERNELS[call.candidate.kernel], run, made.values, References(), made.inputs, made.outputs)

    assert changed(0, 0) is None
    assert "output 0 differs from the reference in 1 of 256 elements, most at (0, 0)" in str(changed(0, 1))
    assert "output 0 differs from the reference" in str(changed(2 * GROUP + 2, 1))


def test_a_conversion_keeps_the_layout_and_knows_no_other_formats() -> None:
    for kernel, forms, reason in (
        ("inductor_quantize", ("ab", "ba:int8"), "the storage format changes in one memory order"),
        ("inductor_quantize", ("ab:bit", "ab:int8"), "it leads from raw to int8"),
        ("inductor_dequantize", ("ab:int8", "ab:bit"), "it leads from int8 to raw"),
        ("torch_copy", ("ab:int8", "ab"), "torch_copy reads and writes tensors by their strides, and ab:int8 has none"),
    ):
        assert reason in str(
            KERNELS[kernel].refuses(conversion(TensorType((4, 4), "float32")), Candidate(kernel, forms))
        )


TOLERANT = {
    "bert-encoder": {
        "value", "attention_dropped", "context", "residual1", "norm1", "linear1_biased", "activation_dropped",
        "residual2",
    },
    "gpt-block": {
        "norm1", "value", "attention_dropped", "context", "residual1", "norm2", "linear1_biased", "activation"
    },
    "llama-block": {"norm1", "value", "context", "residual1", "norm2", "gate", "activation", "up", "gated"},
}  # fmt: skip
"""What products, norms and smooth functions of backward read, and no softmax."""


@pytest.mark.parametrize("name", list(TOLERANT))
def test_what_an_error_goes_through_in_proportion_may_be_8_bits_and_nothing_else(name: str) -> None:
    graph = training_graph(named_model(f"{name}:{'small' if name == 'gpt-block' else 'tiny'}").graph())
    able = {each for each in graph.saved if may_have(graph, each, f"{graph.tensors[each].axes}:int8")}
    assert able == TOLERANT[name]
    for each in ("x", "query", "key", "attention", "query_weight"):
        assert each in graph.saved
        axes = graph.tensors[each].axes
        with pytest.raises(KernelError, match="backward reads it where int8 may not stand for it, or not at all"):
            conversion_of(graph, each, axes, f"{axes}:int8")


def test_relus_result_whose_sign_counts_may_not() -> None:
    extents = {"b": 2, "l": 6, "h": 8, "n": 2, "p": 4, "f": 12}
    graph = training_graph(load_model("bert-encoder").instantiate(None, extents, {"activation": "relu"}).graph())
    assert "activation" in graph.saved
    assert not may_have(graph, "activation", "blf:int8")
    assert may_have(graph, "activation_dropped", "blf:int8")
