"""What is asked of cuBLASLt: seen by a stand-in for its bindings, since products themselves need a GPU."""

import ctypes
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from autotuner.errors import KernelError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import load_model
from autotuner.ir.records import Call, Candidate, Scalar, Subgraph, TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.cublaslt import matmul as cublaslt
from autotuner.space import Space, build_space, space_file
from tests.kernels.calls import ROOMY, faults, layer, prepare

WIDE = {"b": 2, "l": 4, "h": 5, "n": 2, "p": 3, "f": 8}
GELU = "cublaslt_matmul_bias_gelu_tanh"
GELU_GRAD = "cublaslt_matmul_gelu_tanh_grad"
GELU_GRAD_BIAS_GRAD = "cublaslt_matmul_gelu_tanh_grad_bias_grad"
Matrix = NDArray[Any]


class FakeLt:
    """Stands in for nvmath's bindings: keeps what it is asked, and computes nothing."""

    cuBLASLtError = RuntimeError
    MatmulDescAttribute = SimpleNamespace(
        TRANSA="ta", TRANSB="tb", EPILOGUE="epilogue", BIAS_POINTER="bias", EPILOGUE_AUX_POINTER="saved",
        EPILOGUE_AUX_LD="saved_leading",
    )  # fmt: skip
    MatmulPreferenceAttribute = SimpleNamespace(
        MAX_WORKSPACE_BYTES="workspace", **{f"MIN_ALIGNMENT_{name}_BYTES": name for name in "ABCD"}
    )
    matmul_heuristic_result_dtype = SimpleNamespace(itemsize=96)

    def __init__(self, offered: int = 3) -> None:
        self.offered, self.described, self.layouts, self.launched = offered, {}, [], []  # type: ignore[var-annotated]

    def matmul_desc_create(self, *_: int) -> int:
        self.described, self.layouts = {}, []
        return 1

    def matmul_desc_set_attribute(self, _: int, name: str, pointer: int, size: int) -> None:
        self.described[name] = int.from_bytes(ctypes.string_at(pointer, size), "little")

    def matrix_layout_create(self, *shape: int) -> int:
        self.layouts.append(shape)
        return 100 + len(self.layouts)

    def matmul_preference_create(self) -> int:
        return 2

    def matmul_preference_set_attribute(self, *_: Any) -> None:
        pass

    matmul_preference_destroy = matmul_desc_destroy = matrix_layout_destroy = matmul_preference_set_attribute

    def MatmulHeuristicResult(self, count: int) -> Any:
        return SimpleNamespace(ptr=10_000, workspace_size=[0, 512, 0][: self.offered] + [0] * count)

    def matmul_algo_get_heuristic(self, *arguments: int) -> None:
        ctypes.c_int32.from_address(arguments[-1]).value = self.offered

    def matmul(self, *arguments: int) -> None:
        self.launched.append(arguments)


class ComputingLt(FakeLt):
    """Computes on matrices in the CPU's memory what cuBLAS's documentation says of an epilogue's bits."""

    def _matrix(self, pointer: int, data_type: int, rows: int, columns: int, leading: int) -> Matrix:
        """View a column-major matrix of float32 (0) or float16 (2)."""
        held, dtype = (ctypes.c_uint32, np.float32) if data_type == 0 else (ctypes.c_uint16, np.float16)
        flat = np.ctypeslib.as_array((held * (leading * (columns - 1) + rows)).from_address(pointer)).view(dtype)
        return np.lib.stride_tricks.as_strided(flat, (rows, columns), (flat.itemsize, flat.itemsize * leading))

    def matmul(self, *arguments: int) -> None:
        super().matmul(*arguments)
        asked, number = self.described, self.described.get("epilogue", 1)
        shapes = [self.layouts[arguments[at] - 101] for at in (4, 6, 11)]
        a, b, d = (self._matrix(arguments[at], *shape) for at, shape in zip((3, 5, 10), shapes, strict=True))
        left, right = (
            torch.from_numpy((matrix.T if asked[turned] else matrix).astype(np.float32))
            for matrix, turned in ((a, "ta"), (b, "tb"))
        )
        made, kind = left @ right, shapes[2][0]
        along = made.shape[1 if number == 512 else 0]
        vector = self._matrix(asked["bias"], kind, along, 1, along) if "bias" in asked else d
        saved = (
            self._matrix(asked["saved"], kind, made.shape[0], made.shape[1], asked["saved_leading"])
            if "saved" in asked
            else d
        )
        if number & 4:
            made = made + torch.from_numpy(vector.astype(np.float32))
        if number & 128 and number & 32:
            saved[...] = made
        if number & 32:
            made = torch.nn.functional.gelu(made, approximate="tanh")
        if number & 64:
            read = torch.from_numpy(saved.astype(np.float32))
            made = torch.ops.aten.gelu_backward(made, read, approximate="tanh")
        for bit, total in ((16, made.sum(1)), (256, left.sum(1)), (512, right.sum(0))):
            if number & bit:
                vector[:, 0] = total
        d[...] = made


@pytest.fixture
def fake_lt(monkeypatch: pytest.MonkeyPatch) -> FakeLt:
    return stand_in(FakeLt(), monkeypatch)


@pytest.fixture
def computing_lt(monkeypatch: pytest.MonkeyPatch) -> FakeLt:
    return stand_in(ComputingLt(), monkeypatch)


def stand_in(fake: FakeLt, monkeypatch: pytest.MonkeyPatch) -> FakeLt:
    monkeypatch.setattr(cublaslt, "_handle", lambda _: (fake, 7))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=77))
    return fake


@cache
def roomy() -> Space:
    return build_space(layer(ROOMY, "float32"), space_file("cuda"))


def built(kernel: str, algorithm: int) -> tuple[Call, list[Any], Any]:
    """Return the first call of a layer with this kernel and algorithm, its operands in boundary order, and its run."""
    space = roomy()
    params = (("algorithm", algorithm),)
    call = next(c for c in space.calls.values() if (c.candidate.kernel, c.candidate.params) == (kernel, params))
    made = prepare(call)
    return call, [*made.inputs, *made.outputs], made.run


@pytest.mark.slow
def test_a_weights_gradient_and_its_biass_are_one_call_of_the_library(fake_lt: FakeLt) -> None:
    call, operands, run = built("cublaslt_matmul_bias_grad", 1)
    run()
    ((_, _, _, a, _, b, _, _, c, _, d, _, algorithm, workspace, size, stream),) = fake_lt.launched
    pointers = {tensor.data_ptr() for tensor in operands}
    bias = operands[len(call.subgraph.inputs) + [t.dim() for t in operands[len(call.subgraph.inputs) :]].index(1)]
    assert {a, b, d, fake_lt.described["bias"]} == pointers
    assert fake_lt.described["bias"] == bias.data_ptr()
    assert fake_lt.described["epilogue"] in (256, 512)
    summed = a if fake_lt.described["epilogue"] == 256 else b
    (number,) = (node.inputs[0] for node in call.subgraph.nodes if node.kind == "bias_grad")
    assert summed == operands[call.subgraph.inputs.index(number)].data_ptr()
    assert c == d
    assert algorithm == 10_000 + 96
    assert (size, stream) == (512 + 256, 77)
    assert workspace


@pytest.mark.slow
@pytest.mark.usefixtures("fake_lt")
def test_an_algorithm_that_the_library_does_not_offer_is_refused_in_a_sentence() -> None:
    with pytest.raises(KernelError, match="cuBLASLt offers 3 algorithms for this product; there is no number 5"):
        built("cublaslt_matmul", 5)


@pytest.mark.slow
@pytest.mark.usefixtures("fake_lt")
@pytest.mark.parametrize("algorithm", [-1, "first", True, 1.5])
def test_an_algorithm_that_is_no_place_in_a_list_is_refused_in_a_sentence(algorithm: Any) -> None:
    call = built("cublaslt_matmul", 0)[0]
    other = replace(call, candidate=replace(call.candidate, params=(("algorithm", algorithm),)))
    with pytest.raises(KernelError, match=f"algorithm is {algorithm!r}: write a place in the library's list, from 0"):
        prepare(other)


WIDENED = """
version: 1
name: widened
dtype: float16
axes: {b: batch, h: hidden, f: features}
presets: {small: {b: 6, h: 8, f: 5}}
inputs: {x: {axes: bh}}
parameters: {weight: {axes: fh, dtype: float32}}
operators:
  - {name: narrow, kind: cast, spec: "fh->fh", inputs: [weight], outputs: [narrow], attributes: {dtype: float16}}
  - {name: y, kind: contraction, spec: "bh,fh->bf", inputs: [x, narrow], outputs: [y]}
outputs: [y]
"""


def test_a_product_that_is_cast_to_float32_is_one_call_of_the_library(computing_lt: FakeLt, tmp_path: Path) -> None:
    (tmp_path / "widened.yaml").write_text(WIDENED)
    graph = training_graph(load_model(str(tmp_path / "widened.yaml")).instantiate("small").graph())
    found = [
        call for call in build_space(graph, space_file("cuda")).calls.values()
        if call.subgraph.kinds == ("contraction", "cast")
    ]  # fmt: skip
    assert {call.candidate.kernel for call in found} == {"cublas_matmul", "cublaslt_matmul"}
    lt = [call for call in found if call.candidate.params == (("algorithm", 0),)]
    assert faults(lt) == {}
    assert [shape[0] for shape in computing_lt.layouts] == [2, 2, 0]
    call = lt[0]
    narrowed = tuple(
        replace(tensor, dtype="bfloat16") if tensor.dtype == "float32" else tensor for tensor in call.subgraph.tensors
    )
    for kernel in ("cublas_matmul", "cublaslt_matmul"):
        reason = KERNELS[kernel].refuses(replace(call.subgraph, tensors=narrowed), call.candidate)
        assert reason is not None
        assert reason.endswith("this is a cast from float16 to bfloat16")


STACKED = """
version: 1
name: stacked
dtype: float16
axes: {b: batch, l: position, h: hidden, n: head, p: feature}
presets: {small: {b: 2, l: 3, h: 8, n: 2, p: 4}}
inputs: {x: {axes: blh}}
parameters: {first: {axes: nph, dtype: float32}, second: {axes: nph, dtype: float32}}
operators:
  - {name: narrow, kind: cast, spec: "nph->nph", inputs: [first], outputs: [narrow], attributes: {dtype: float16}}
  - {name: other, kind: cast, spec: "nph->nph", inputs: [second], outputs: [other], attributes: {dtype: float16}}
  - {name: one, kind: contraction, spec: "blh,nph->blnp", inputs: [x, narrow], outputs: [one]}
  - {name: two, kind: contraction, spec: "blh,nph->blnp", inputs: [x, other], outputs: [two]}
  - {name: act, kind: silu, spec: "blnp->blnp", inputs: [one], outputs: [act]}
  - {name: y, kind: multiply, spec: "blnp,blnp->blnp", inputs: [act, two], outputs: [y]}
outputs: [y]
"""


def test_stacked_gradients_that_are_cast_to_float32_are_one_call_of_the_library(
    computing_lt: FakeLt, tmp_path: Path
) -> None:
    (tmp_path / "stacked.yaml").write_text(STACKED)
    graph = training_graph(load_model(str(tmp_path / "stacked.yaml")).instantiate("small").graph())
    found = [
        call for call in build_space(graph, space_file("cuda")).calls.values()
        if call.subgraph.kinds == ("contraction", "contraction", "cast", "cast")
    ]  # fmt: skip
    assert {call.candidate.kernel for call in found} == {"cublas_stacked_matmul", "cublaslt_stacked_matmul"}
    lt = [call for call in found if call.candidate.params == (("algorithm", 0),)]
    assert {form[0] for call in lt for form in call.candidate.forms[-2:]} == {"*"}
    assert faults(lt) == {}
    assert [shape[0] for shape in computing_lt.layouts] == [2, 2, 0]
    call = lt[0]
    narrowed = tuple(replace(tensor, dtype="bfloat16") for tensor in call.subgraph.tensors)
    reason = KERNELS["cublaslt_stacked_matmul"].refuses(replace(call.subgraph, tensors=narrowed), call.candidate)
    assert reason is not None
    assert reason.endswith("this is a cast from bfloat16 to bfloat16")


# GELU


@cache
def offered(
    model: str, *, training: bool = True, dtype: str = "float16", length: int = 4, f: int = 8, **options: Scalar
) -> Space:
    """Return a model's space for CUDA."""
    graph = load_model(model).instantiate(None, WIDE | {"l": length, "f": f}, options, dtype).graph()
    return build_space(training_graph(graph) if training else graph, space_file("cuda"))


def first(space: Space, kernel: str) -> Call:
    return next(call for call in space.calls.values() if call.candidate.kernel == kernel)


def rows(subgraph: Subgraph, kernel: str) -> dict[tuple[str, ...], str | None]:
    """Return each row of layouts that a kernel enumerates, and what its rule says of it."""
    rule = KERNELS[kernel]
    return {row: rule.refuses(subgraph, Candidate(kernel, row)) for row in rule.layouts(subgraph)}


def declared(space: Space, kernel: str) -> Subgraph:
    """Return what a kernel covers, its axes as the model declares them."""
    cover = next(choice.cover for choice in space.choices if choice.candidate.kernel == kernel)
    named = {operator.name: operator for operator in space.graph.operators}
    return space.graph.subgraph([named[name] for name in cover.operators], cover.inputs, cover.outputs)


FUSED = {
    GELU: (("linear1", "linear1_biased", "activation"), ("linear1_biased", "activation")),
    GELU_GRAD: (("grad_activation", "grad_linear1_biased"), ("grad_linear1_biased",)),
    GELU_GRAD_BIAS_GRAD: (
        ("grad_activation", "grad_linear1_biased", "grad_linear1_bias"), ("grad_linear1_biased", "grad_linear1_bias"),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, options",
    [("gpt-block", {}), ("bert-encoder", {"activation": "gelu_tanh", "activation_dropout": 0.0})],
)
def test_gelu_and_its_gradient_are_offered_as_epilogues_of_the_products_before_them(
    model: str, options: Mapping[str, Scalar]
) -> None:
    choices = offered(model, **options).choices
    for kernel, cover in FUSED.items():
        found = [choice for choice in choices if choice.candidate.kernel == kernel]
        assert {(choice.cover.operators, choice.cover.outputs) for choice in found} == {cover}
        assert [dict(choice.candidate.params)["algorithm"] for choice in found] == list(range(8))


@pytest.mark.slow
def test_a_dropout_before_gelus_gradient_leaves_only_the_forward_epilogue() -> None:
    space = offered("bert-encoder", activation="gelu_tanh", activation_dropout=0.1)
    assert {c.candidate.kernel for c in space.choices if "gelu_tanh" in c.candidate.kernel} & set(FUSED) == {GELU}


@pytest.mark.slow
def test_gelu_by_erf_is_no_epilogue() -> None:
    space = offered("bert-encoder", activation="gelu_erf", activation_dropout=0.0)
    assert not {choice.candidate.kernel for choice in space.choices} & set(FUSED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel, training, number, read",
    [
        (GELU, True, 164, {"epilogue", "bias", "saved", "saved_leading"}),
        (GELU, False, 36, {"epilogue", "bias"}),
        (GELU_GRAD, True, 192, {"epilogue", "saved", "saved_leading"}),
        (GELU_GRAD_BIAS_GRAD, True, 208, {"epilogue", "bias", "saved", "saved_leading"}),
    ],
)
def test_what_the_library_is_told_of_gelu(
    fake_lt: FakeLt, kernel: str, training: bool, number: int, read: set[str]
) -> None:
    call = first(offered("gpt-block", training=training), kernel)
    made = prepare(call)
    made.run()
    asked = fake_lt.described
    assert asked["epilogue"] == number
    assert set(asked) - {"ta", "tb"} == read
    operands = dict(zip(call.subgraph.boundary, (*made.inputs, *made.outputs), strict=True))
    gelu = next(node for node in call.subgraph.nodes if node.kind.startswith("gelu_tanh"))
    expected = {"d": gelu.outputs[0], "saved": gelu.inputs[-1]}
    for node in call.subgraph.nodes:
        if node.kind in ("bias", "bias_grad"):
            expected["bias"] = node.inputs[1] if node.kind == "bias" else node.outputs[0]
    pointers = {name: asked[name] for name in ("bias", "saved") if name in asked} | {"d": fake_lt.launched[0][10]}
    assert pointers == {name: operands[expected[name]].data_ptr() for name in pointers}  # type: ignore[union-attr]
    _, rows_of_d, columns_of_d, leading = fake_lt.layouts[fake_lt.launched[0][11] - 101]
    assert (rows_of_d, columns_of_d, leading) == (WIDE["f"], WIDE["b"] * WIDE["l"], WIDE["f"])
    assert asked.get("saved_leading", leading) == leading


@pytest.mark.usefixtures("computing_lt")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.slow
def test_epilogues_in_every_layout_that_is_admitted_equal_the_reference(training: bool) -> None:
    space = offered("gpt-block", training=training)
    for kernel in FUSED if training else (GELU,):
        subgraph = declared(space, kernel)
        admitted = [row for row, reason in rows(subgraph, kernel).items() if reason is None]
        assert len(admitted) >= 8, kernel
        assert faults([Call(subgraph, Candidate(kernel, row)) for row in admitted]) == {}, kernel


@pytest.mark.usefixtures("computing_lt")
@pytest.mark.parametrize("kernel", ["cublaslt_matmul", "cublaslt_matmul_bias", "cublaslt_matmul_bias_grad"])
@pytest.mark.slow
def test_single_products_and_sums_as_the_library_is_asked_for_them_equal_the_reference(kernel: str) -> None:
    found = [call for call in offered("gpt-block").calls.values() if call.candidate.kernel == kernel]
    assert len(found) >= 6
    assert faults([call for call in found if dict(call.candidate.params)["algorithm"] == 0]) == {}


@pytest.mark.parametrize("kernel", [GELU, GELU_GRAD_BIAS_GRAD])
@pytest.mark.slow
def test_a_bias_runs_along_the_contiguous_axis_of_what_gelu_makes(kernel: str) -> None:
    subgraph = declared(offered("gpt-block"), kernel)
    made = subgraph.boundary.index(next(n for n in subgraph.outputs if len(subgraph.tensors[n].extents) == 3))
    refused = {row: reason for row, reason in rows(subgraph, kernel).items() if reason}
    assert {row[made] for row in rows(subgraph, kernel)} == {"abc", "bac", "cab", "cba"}
    assert {row[made] for row in refused} == {"cab", "cba"}
    for reason in refused.values():
        assert re.fullmatch(r"the bias runs along axes '.' of the product, whose contiguous ones are '..'", reason)


@pytest.mark.slow
def test_without_a_bias_gelus_gradient_takes_every_order_whose_contiguous_axes_are_a_multiple_of_8() -> None:
    for length, reason in ((4, None), (3, "GELU's input is saved along 6 elements, which is no multiple of 8")):
        made = {
            row[-1]: why
            for row, why in rows(declared(offered("gpt-block", length=length), GELU_GRAD), GELU_GRAD).items()
        }
        assert made == {"abc": None, "bac": None, "cab": reason, "cba": reason}


@pytest.mark.slow
def test_gelus_input_lies_as_what_is_made_of_it() -> None:
    subgraph = declared(offered("gpt-block"), GELU)
    row = list(next(row for row, reason in rows(subgraph, GELU).items() if reason is None and row[-1] == "abc"))
    row[-2] = "bac"
    reason = KERNELS[GELU].refuses(subgraph, Candidate(GELU, tuple(row)))
    assert reason == "GELU's input lies as bac, what is made of it as abc"


@pytest.mark.slow
def test_rows_that_are_no_multiple_of_8_are_refused_only_where_gelus_input_is_saved() -> None:
    for training, offers in ((True, set()), (False, {GELU})):
        choices = offered("gpt-block", training=training, f=12).choices
        assert {choice.candidate.kernel for choice in choices} & set(FUSED) == offers


@pytest.mark.slow
@pytest.mark.parametrize("dtype, offers", [("bfloat16", set(FUSED)), ("float32", {GELU}), ("float64", set())])
def test_gelus_gradient_is_offered_in_16_bits_and_gelu_in_float32_too(dtype: str, offers: set[str]) -> None:
    choices = offered("gpt-block", dtype=dtype).choices
    assert {choice.candidate.kernel for choice in choices} & set(FUSED) == offers


def test_an_epilogue_says_which_types_and_which_products_it_does_not_take() -> None:
    subgraph = declared(offered("gpt-block"), GELU_GRAD)
    row = next(row for row, reason in rows(subgraph, GELU_GRAD).items() if reason is None)
    for tensors, sentence in (
        (
            [TensorType(tensor.extents, "float32") for tensor in subgraph.tensors],
            "cuBLASLt's gelu_tanh_grad is tried in one type of bfloat16, float16, not in float32",
        ),
        (
            [TensorType(tuple(1 if e == WIDE["h"] else e for e in t.extents), t.dtype) for t in subgraph.tensors],
            "cuBLASLt has GELU's gradient behind no product whose contracted extent is 1",
        ),
    ):
        other = replace(subgraph, tensors=tuple(tensors))
        assert KERNELS[GELU_GRAD].refuses(other, Candidate(GELU_GRAD, row)) == sentence
