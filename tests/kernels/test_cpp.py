"""Own CPU kernels in C++: every form that is admitted against the reference, at extents around those of a tile."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph
from autotuner.ir.models import load_model
from autotuner.ir.records import Call, Candidate, Node, Subgraph, TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.cpp import compiled
from autotuner.kernels.cpp.matmul import BehindProduct, matrix_product
from tests.kernels.calls import ODD, ROOMY, admitted, faults, hidden_copies, layer, prepare, subgraphs

COUNTS = {
    "cpp_matmul": 700,
    "cpp_matmul_bias": 80,
    "cpp_matmul_add": 80,
    "cpp_matmul_bias_gelu_erf": 16,
    "cpp_matmul_bias_gelu_tanh": 16,
    "cpp_matmul_gelu_tanh_grad": 16,
    "cpp_stacked_matmul": 120,
    "cpp_stacked_matmul_bias": 30,
    "cpp_attention": 10,
    "cpp_attention_grad": 40,
}
FEED_FORWARD = """
version: 1
name: feed-forward
axes: {b: row, h: hidden, f: inner}
presets: {tiny: {b: 5, h: 6, f: 7}}
inputs: {x: {axes: bh}}
parameters: {up: fh, down: hf}
operators:
  - {name: inner, kind: contraction, spec: "bh,fh->bf", inputs: [x, up], outputs: [inner]}
  - {name: activation, kind: GELU, spec: "bf->bf", inputs: [inner], outputs: [activation]}
  - {name: outer, kind: contraction, spec: "bf,hf->bh", inputs: [activation, down], outputs: [outer]}
  - {name: y, kind: add, spec: "bh,bh->bh", inputs: [outer, x], outputs: [y]}
outputs: [y]
"""
TILED = {"b": 61, "h": 37, "f": 450}
"""More rows than tiles have, columns of a whole number of panels and some, and sums in two parts."""


def calls_in(graph: Graph, kernel: str) -> list[Call]:
    """Return all that a kernel's rule admits of what it covers in a graph."""
    rule = KERNELS[kernel]
    covered = dict.fromkeys(subgraph for name, subgraph in subgraphs(graph) if name == kernel)
    return [
        Call(subgraph, candidate)
        for subgraph in covered
        for candidate in (Candidate(kernel, row) for row in dict.fromkeys(rule.layouts(subgraph)))
        if rule.refuses(subgraph, candidate) is None
    ]


def feed_forward(folder: Path, gelu: str, extents: dict[str, int]) -> Graph:
    path = folder / "feed_forward.yaml"
    path.write_text(FEED_FORWARD.replace("GELU", gelu))
    return training_graph(load_model(str(path)).instantiate(None, extents, {}, "float32").graph())


def product(m: int, n: int, k: int, batch: int = 1) -> Call:
    """Return a product of matrices that lie as declared, or of a batch of them."""
    shapes = [(batch, m, k), (batch, k, n), (batch, m, n)]
    tensors = tuple(TensorType(shape, "float32") for shape in shapes)
    subgraph = Subgraph((Node("contraction", "abc,acd->abd", (0, 1), (2,)),), tensors, (0, 1), (2,))
    return Call(subgraph, Candidate("cpp_matmul", ("abc", "abc", "abc")))


def attention(rows: int, columns: int, features: int, is_causal: bool) -> Iterator[Call]:
    """Yield attention of two heads and its gradients, as declared."""
    extents = {"b": 2, "n": 2, "q": rows, "k": columns, "p": features}
    graph = training_graph(
        load_model(str(_attention_file(is_causal))).instantiate(None, extents, {}, "float32").graph()
    )
    for kernel in ("cpp_attention", "cpp_attention_grad"):
        yield calls_in(graph, kernel)[0]


def _attention_file(is_causal: bool) -> Path:
    return Path(__file__).parents[1] / "data" / f"attention_{'causal' if is_causal else 'whole'}.yaml"


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", COUNTS)
@pytest.mark.parametrize("extents", [ODD, ROOMY], ids=["odd", "roomy"])
def test_every_layout_row_equals_the_reference(kernel: str, extents: dict[str, int]) -> None:
    calls = admitted(kernel, extents, "float32")
    assert len(calls) >= COUNTS[kernel]
    assert faults(calls) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", COUNTS)
def test_no_operand_is_copied(kernel: str) -> None:
    assert hidden_copies(admitted(kernel, ROOMY, "float32", [1, 3])[::5]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("gelu", ["gelu_erf", "gelu_tanh"])
@pytest.mark.parametrize("extents", [{"b": 5, "h": 6, "f": 7}, TILED], ids=["odd", "tiled"])
def test_products_beside_gelu_equal_the_reference_in_every_layout(
    gelu: str, extents: dict[str, int], tmp_path: Path
) -> None:
    graph = feed_forward(tmp_path, gelu, extents)
    for kernel in (f"cpp_matmul_{gelu}", f"cpp_matmul_{gelu}_grad", "cpp_matmul_add", "cpp_matmul"):
        calls = calls_in(graph, kernel)
        assert len(calls) >= 8, kernel
        assert faults(calls) == {}, kernel


@pytest.mark.parametrize(
    "extents", [(1, 1, 1), (1, 700, 3), (12, 32, 384), (13, 33, 385), (24, 31, 100), (500, 1, 9), (61, 450, 900)]
)
def test_products_around_the_extents_of_a_tile_equal_the_reference(extents: tuple[int, int, int]) -> None:
    calls = [product(*extents), product(*extents, batch=3)]
    # contiguous along the summed axis or not, each factor and the product
    forms = [
        ("abc", "abc", "abc"),
        ("acb", "abc", "abc"),
        ("abc", "acb", "abc"),
        ("acb", "acb", "acb"),
        ("bac", "bac", "bac"),
    ]
    tried = [Call(call.subgraph, Candidate("cpp_matmul", row)) for call in calls for row in forms]
    kept = [call for call in tried if KERNELS["cpp_matmul"].refuses(call.subgraph, call.candidate) is None]
    assert len(kept) >= 8
    assert faults(kept) == {}


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize(
    "extents", [(1, 1, 1), (12, 32, 32), (13, 33, 31), (64, 64, 32), (70, 40, 40), (40, 70, 24), (200, 197, 64)]
)
def test_attention_around_the_extents_of_a_tile_equals_the_reference(
    extents: tuple[int, int, int], is_causal: bool
) -> None:
    calls = list(attention(*extents, is_causal))
    assert [call.candidate.kernel for call in calls] == ["cpp_attention", "cpp_attention_grad"]
    assert faults(calls) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["cpp_attention", "cpp_attention_grad"])
@pytest.mark.parametrize("heads", [1, 3])
def test_heads_that_share_a_key_equal_the_reference(kernel: str, heads: int) -> None:
    extents = {"b": 2, "l": 37, "h": 15, "g": 2, "r": heads, "p": 6, "f": 9}
    graph = training_graph(load_model("llama-block").instantiate(None, extents, {}, "float32").graph())
    calls = calls_in(graph, kernel)
    assert calls
    assert faults(calls) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_any_number_of_threads_computes_the_same(count: int) -> None:
    calls = [product(61, 450, 385), product(13, 33, 100, batch=4), *attention(200, 197, 32, True)]
    made = []
    for number in (1, count):
        torch.set_num_threads(number)
        assert faults(calls) == {}
        torch.manual_seed(0)
        a, b, c = torch.randn(100, 385), torch.randn(385, 450), torch.empty(100, 450)
        matrix_product(a, b, c)()
        made.append(c)
    assert torch.equal(*made)


@pytest.mark.slow
def test_torchs_number_of_threads_is_used_and_its_openmp() -> None:
    code = """
import os, torch
from tests.kernels.test_cpp import prepare, product
torch.set_num_threads(1)
made = prepare(product(500, 400, 300))
before = len(os.listdir("/proc/self/task"))
made.run()
alone = len(os.listdir("/proc/self/task")) - before
torch.set_num_threads(3)
made.run()
print(alone, len(os.listdir("/proc/self/task")) - before)
print({line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.split("/")[-1]}.__len__())
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert ran.stdout.split() == ["0", "2", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [("-march=haswell",), ()], ids=["AVX2", "portable"])
def test_other_processors_vectors_compute_the_same(
    architecture: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    if architecture and not {"avx2", "fma"} <= set(flags):
        pytest.skip("this processor has no AVX2")
    monkeypatch.setattr(compiled, "ARCHITECTURE", architecture)
    compiled.library.cache_clear()
    try:
        graph = feed_forward(tmp_path, "gelu_erf", TILED)
        calls = [product(61, 450, 385), *attention(70, 40, 40, True), *attention(40, 70, 24, False)]
        calls += [
            call for name in ("cpp_matmul_gelu_erf", "cpp_matmul_gelu_erf_grad") for call in calls_in(graph, name)
        ]
        calls += admitted("cpp_stacked_matmul_bias", ROOMY, "float32", [1])
        assert faults(calls) == {}
    finally:
        compiled.library.cache_clear()


@pytest.mark.parametrize("kind", ["gelu_erf", "gelu_tanh"])
def test_gelu_and_its_gradient_are_right_on_the_whole_line_and_beyond(kind: str) -> None:
    x = torch.cat([torch.linspace(-9, 9, 40_001), torch.tensor([-1e4, 1e4, 1e30, float("inf"), float("nan")])])
    approximate = {"gelu_erf": "none", "gelu_tanh": "tanh"}[kind]
    saved, made, slope = torch.empty(1, len(x)), torch.empty(1, len(x)), torch.empty(1, len(x))
    matrix_product(torch.ones(1, 1), x[None], made, BehindProduct(kind, None, saved))()
    matrix_product(torch.ones(1, 1), torch.ones(1, len(x)), slope, BehindProduct(f"{kind}_grad", None, x[None]))()
    assert torch.equal(saved[0, :-1], x[:-1])
    wide = x.double().requires_grad_()
    expected = torch.nn.functional.gelu(wide, approximate=approximate)
    expected[:-2].sum().backward()  # type: ignore[no-untyped-call]
    assert wide.grad is not None
    assert torch.isnan(made[0, -1])
    assert made[0, -2] == float("inf")
    assert (made[0, :-2] - expected[:-2]).abs().div(expected[:-2].abs().clamp(min=1)).max() < 1e-6
    assert (slope[0, :-3] - wide.grad[:-3]).abs().max() < 1e-6


def test_numbers_that_are_none_stay_what_they_are() -> None:
    a, b, c = torch.ones(20, 40), torch.ones(40, 50), torch.empty(20, 50)
    a[3, 7], b[5, 11] = float("nan"), float("inf")
    matrix_product(a, b, c)()
    assert torch.equal(c.isnan().any(1), torch.arange(20) == 3)
    assert torch.equal(c.isinf().any(0), torch.arange(50) == 11)


def test_operands_of_another_type_are_refused_in_a_sentence() -> None:
    (call, *_) = calls_in(layer(ODD, "float32", model="gpt-block", p=0.0), "cpp_attention")
    tensors = tuple(TensorType(tensor.extents, "bfloat16") for tensor in call.subgraph.tensors)
    other = Subgraph(call.subgraph.nodes, tensors, call.subgraph.inputs, call.subgraph.outputs)
    reason = KERNELS["cpp_attention"].refuses(other, call.candidate)
    assert reason == "it computes in float32; an operand is bfloat16"


def test_no_layer_in_another_type_has_a_call_of_theirs() -> None:
    names: Sequence[str] = [name for name in COUNTS if admitted(name, ODD, "float64", [1])]
    assert names == []


def test_a_call_is_prepared_once_and_reads_what_its_operands_hold_then() -> None:
    made = prepare(product(5, 6, 7))
    a, b = made.inputs
    (c,) = made.outputs
    assert a is not None
    assert b is not None
    assert c is not None
    for factor in (1.0, 2.0):
        a.fill_(factor)
        b.fill_(1.0)
        made.run()
        assert torch.equal(c, torch.full_like(c, 7 * factor))
