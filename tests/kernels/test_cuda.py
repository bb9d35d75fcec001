"""Kernels of a CUDA device: their rules everywhere, products on the CPU, all else where there is such a device."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from autotuner.errors import KernelError
from autotuner.ir.autodiff import training_graph
from autotuner.ir.form import Form
from autotuner.ir.models import load_model
from autotuner.ir.records import Call, Candidate, Node, Subgraph, TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.cublaslt.matmul import oriented
from autotuner.kernels.torch.attention import factor
from autotuner.kernels.torch.attention_masks import library_mask
from autotuner.kernels.torch.formats import decoded
from autotuner.measure.operands import Buffers, Values
from autotuner.measure.verification import References, fault
from autotuner.space import build_space, space_file
from tests.kernels.calls import ODD, ROOMY, faults, layer, repeated_norm
from tests.kernels.library import LIBRARY
from tests.kernels.test_rows import EXTENTS, declared, sets, sets_of
from tests.mixed import mixed

HEADS = {"b": 2, "l": 96, "h": 64, "n": 4, "p": 16, "f": 128}
ATTENTION = [f"{name}{suffix}" for name in LIBRARY for suffix in ("", "_grad")]
EFFICIENT = [kernel for kernel in ATTENTION if "efficient" in kernel]
GELU = [f"cublaslt_matmul_{name}" for name in ("bias_gelu_tanh", "gelu_tanh_grad", "gelu_tanh_grad_bias_grad")]
PRODUCTS = ("cublas_matmul_bias", "cublas_stacked_matmul_bias", "cublas_matmul", "cublas_matmul_loop")


def calls(
    extents: dict[str, int], dtype: str, *, p: float = 0.25, model: str = "bert-encoder", **options: bool
) -> dict[str, list[Call]]:
    """Return the calls of a layer's search space by kernel."""
    return _calls(tuple(extents.items()), dtype, p, model, tuple(options.items()))


@cache
def _calls(
    extents: tuple[tuple[str, int], ...], dtype: str, p: float, model: str, options: tuple[tuple[str, bool], ...]
) -> dict[str, list[Call]]:
    graph = layer(dict(extents), dtype, p=p, model=model, **dict(options))
    found: dict[str, list[Call]] = {}
    for call in build_space(graph, space_file("cuda")).calls.values():
        found.setdefault(call.candidate.kernel, []).append(call)
    return found


@pytest.fixture(scope="module")
def products() -> dict[str, list[Call]]:
    return calls(ROOMY, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_products_for_cuda_equal_the_reference_on_a_cpu_too(kernel: str, products: dict[str, list[Call]]) -> None:
    assert len(products[kernel]) >= 16
    assert faults(products[kernel][::3]) == {}


@pytest.mark.slow
def test_attention_is_offered_for_heads_of_a_multiple_of_8_features_and_float32_by_one_library() -> None:
    half, single, odd = calls(HEADS, "bfloat16"), calls(HEADS, "float32"), calls(ODD, "bfloat16")
    for kernel in ATTENTION:
        assert len(half[kernel]) >= 5, kernel
        assert (kernel in single) == ("efficient" in kernel), kernel
        assert kernel not in odd, kernel
    call = half["cudnn_attention"][0]
    forms = tuple(text.replace(":cudnn", "") for text in call.candidate.forms)
    reason = KERNELS["cudnn_attention"].refuses(call.subgraph, Candidate("cudnn_attention", forms))
    assert reason == "its mask is of its own generator, cudnn; abcd is not"


def test_a_mask_of_a_library_is_the_state_of_its_generator_whatever_its_extents() -> None:
    for text, length in (("bnqk:flash", 2), ("bnqk:cudnn", 1), ("bnqk:efficient", 2)):
        form = Form.parse(text)
        lies = form.stored("bfloat16", "bnqk", (8, 16, 512, 512))
        assert (lies.dtype, lies.extents, lies.length) == ("int64", (length,), length)
        assert str(form) == text


@pytest.mark.parametrize("turned", [False, True])
def test_a_product_whose_rows_are_contiguous_is_asked_for_transposed(turned: bool) -> None:
    a, b = torch.zeros(3, 5), torch.zeros(7, 5).t()
    c = torch.zeros(7, 3).t() if turned else torch.zeros(3, 7)
    seen = oriented(a, b, c)
    assert seen.swapped is not turned
    first, second = (a, b) if turned else (b, a)
    assert (seen.a.pointer, seen.b.pointer) == (first.data_ptr(), second.data_ptr())
    assert (seen.d.rows, seen.d.columns, seen.d.leading) == ((3, 7, 3) if turned else (7, 3, 7))
    for operand, rows, columns in ((seen.a, seen.d.rows, 5), (seen.b, 5, seen.d.columns)):
        lies = (operand.columns, operand.rows) if operand.transposed else (operand.rows, operand.columns)
        assert lies == (rows, columns)
        assert operand.leading == operand.rows
    assert (seen.a.transposed, seen.b.transposed) == (True, False)


@pytest.mark.slow
def test_epilogues_of_sums_are_offered_for_single_products_only() -> None:
    found = calls(ROOMY, "float32")
    algorithms = {dict(call.candidate.params)["algorithm"] for call in found["cublaslt_matmul_bias_grad"]}
    assert algorithms == set(range(8))
    batched = next(c for c in found["cublas_matmul"] if c.subgraph.nodes[0].spec.count("d") > 1)
    reason = KERNELS["cublaslt_matmul"].refuses(batched.subgraph, Candidate("cublaslt_matmul", batched.candidate.forms))
    assert reason == "it is asked for single products; this is a batch of 9"


def verified(found: Sequence[Call]) -> dict[str, str]:
    """Return what is wrong with calls on the CUDA device, by call."""
    wrong = {}
    ran = False
    device = torch.device("cuda")
    for call in found:
        kernel = KERNELS[call.candidate.kernel]
        values, buffers = Values(call.subgraph, kernel.consistent, device), Buffers(device)
        inputs, outputs = buffers.inputs(call, values, 0), buffers.outputs(call, values, 0)
        try:
            run = kernel.builder()(call, inputs, outputs)
        except KernelError as error:
            if "there is no number" not in str(error):
                wrong[f"{call.candidate.kernel} {call.candidate.forms}"] = str(error)
            continue
        ran = True
        reason = fault(call, kernel, run, values, References(), inputs, outputs)
        if reason:
            wrong[f"{call.candidate.kernel} {call.candidate.forms}"] = reason
    assert ran
    return wrong


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("model", ["bert-encoder", "gpt-block"])
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_attention_of_a_library_equals_the_reference(dtype: str, model: str, p: float) -> None:
    found = calls(HEADS, dtype, p=p, model=model)
    for kernel in ATTENTION if dtype != "float32" else EFFICIENT:
        assert len(found[kernel]) >= 5, kernel
        assert verified(found[kernel]) == {}, kernel


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_attention_with_an_added_mask_equals_the_reference(dtype: str, p: float) -> None:
    # Neither heads nor rows that are multiples of what a block computes, and a log-sum-exp that must be padded.
    found = calls(HEADS | {"l": 40, "p": 136}, dtype, p=p, attention_mask=True)
    for kernel in EFFICIENT:
        assert len(found[kernel]) >= 5, kernel
        assert verified(found[kernel]) == {}, kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("p", "dropped"), [(0.05, None), (0.1, None), (0.25, None), (0.6, None), (0.01, "0.0117188"), (0.99, "0.988281")]
)
def test_flash_attention_refuses_where_whole_256ths_are_far_from_p(p: float, dropped: str | None) -> None:
    known = calls(HEADS, "bfloat16")
    for kernel in ("cuda_flash_attention", "cuda_flash_attention_grad", "cudnn_attention"):
        call = known[kernel][0]
        nodes = (replace(n, attributes=(("p", p),)) if "dropout" in n.kind else n for n in call.subgraph.nodes)
        reason = KERNELS[kernel].refuses(replace(call.subgraph, nodes=tuple(nodes)), call.candidate)
        whole = None if dropped is None else f"it drops whole 256ths of the weights: {dropped} where p is {p:g}"
        assert reason == (None if kernel == "cudnn_attention" else whole)


@pytest.mark.gpu
@pytest.mark.parametrize("p", [0.05, 0.1, 0.6])
def test_flash_attention_drops_the_256ths_that_are_expected_of_it(p: float) -> None:
    found = calls(HEADS | {"l": 640}, "bfloat16", p=p)  # 3,276,800 weights: chance is below half a 256th
    for kernel in ("cuda_flash_attention", "cuda_flash_attention_grad"):
        assert verified(found[kernel]) == {}, kernel


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_other_kernel_equals_the_reference(dtype: str) -> None:
    for kernel, found in calls(HEADS, dtype).items():
        if kernel not in ATTENTION:
            assert verified(found[:: 1 + len(found) // 12]) == {}, kernel


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("model", ["llama-block", "t5-block"])
def test_every_kernel_of_kinds_that_llama_and_t5_add_equals_the_reference(dtype: str, model: str) -> None:
    new = ("multiply", "silu", "rotary", "rms_norm")
    found: dict[str, list[Call]] = {}
    graph = training_graph(load_model(model).instantiate("tiny", dtype=dtype).graph())
    for call in build_space(graph, space_file("cuda")).calls.values():
        if any(kind.startswith(new) for kind in call.subgraph.kinds) or "attention" in call.candidate.kernel:
            found.setdefault(call.candidate.kernel, []).append(call)
    assert {"inductor", "torch_multiply", "torch_rms_norm", "cupy_rows"} <= set(found)
    assert dtype == "float32" or {"triton_attention", "triton_attention_grad"} <= set(found)
    for kernel, own in found.items():
        assert verified(own[:: 1 + len(own) // 12]) == {}, kernel


def every_row(kernel: str, subgraph: Subgraph) -> list[Call]:
    """Return the calls of a kernel of cuBLASLt in every layout that its rule admits, with each algorithm."""
    rule = KERNELS[kernel]
    admitted = [row for row in rule.layouts(subgraph) if rule.refuses(subgraph, Candidate(kernel, row)) is None]
    assert len(admitted) >= 4
    return [Call(subgraph, Candidate(kernel, row, (("algorithm", n),))) for row in admitted for n in range(8)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gelu_and_its_gradient_as_epilogues_equal_the_reference(dtype: str) -> None:
    found = calls(HEADS, dtype, p=0.0, model="gpt-block")
    offered = [kernel for kernel in GELU if kernel in found]
    assert offered == (GELU[:1] if dtype == "float32" else GELU)
    for kernel in offered:
        assert verified(every_row(kernel, found[kernel][0].subgraph)) == {}, kernel


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gelu_as_an_epilogue_equals_the_reference_where_nothing_reads_its_input_again(dtype: str) -> None:
    saving = calls(HEADS, dtype, p=0.0, model="gpt-block")[GELU[0]][0].subgraph
    assert verified(every_row(GELU[0], replace(saving, outputs=saving.outputs[1:]))) == {}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("library", "dtype"), [*((library, torch.bfloat16) for library in LIBRARY.values()), ("efficient", torch.float32)]
)
def test_a_mask_that_is_read_off_is_the_one_that_drops(library: str, dtype: torch.dtype) -> None:
    state = torch.tensor([2**59 + 7, 4], device="cuda")  # an offset too, which cuDNN's own masks have not
    before = torch.cuda.get_rng_state()
    kept = library_mask(library, state, (2, 3, 70, 130), 0.25)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert abs(float(kept.double().mean()) - 0.75) < 0.02
    query, key, value = (torch.randn(2, 3, rows, 32, device="cuda", dtype=dtype) for rows in (70, 130, 130))
    generator = torch.cuda.default_generators[0]
    generator.manual_seed(2**59 + 7)
    generator.set_offset(4)
    aten = torch.ops.aten
    if library == "flash":
        out = aten._scaled_dot_product_flash_attention(query, key, value, 0.25, False, False, scale=0.2)[0]
    elif library == "efficient":
        out = aten._scaled_dot_product_efficient_attention(query, key, value, None, False, 0.25, False, scale=0.2)[0]
    else:
        out = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.25, False, False, scale=0.2)[0]
    weights = (query.double() @ key.double().transpose(-1, -2) * 0.2).softmax(-1) * kept / 0.75
    assert torch.allclose(out.double(), weights @ value.double(), atol=0.05)
    stored = torch.tensor([2**59 + 7, 4], device="cuda")
    tensor = TensorType((2, 3, 70, 130), "bfloat16")
    assert torch.equal(decoded(stored, Form.parse(f"abcd:{library}"), tensor, 0.25), kept)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "dtype"), [*product(LIBRARY, ("bfloat16", "float16")), ("cuda_efficient_attention", "float32")]
)
def test_each_replay_of_a_graph_draws_another_mask_and_backward_drops_by_it(kernel: str, dtype: str) -> None:
    found, device = calls(HEADS, dtype), torch.device("cuda")
    forward, backward = (
        next(c for c in found[name] if all(text[:4] in ("abcd", "abc") for text in c.candidate.forms))
        for name in (kernel, f"{kernel}_grad")
    )
    values, buffers = Values(forward.subgraph, "", device), Buffers(device)
    inputs, (out, log_sum_exp, state) = buffers.inputs(forward, values, 0), buffers.outputs(forward, values, 0)
    made = Buffers(device).outputs(backward, Values(backward.subgraph, "", device), 0)
    assert out is not None
    assert state is not None
    grad = torch.randn_like(out)
    runs = (
        KERNELS[kernel].builder()(forward, inputs, (out, log_sum_exp, state)),
        KERNELS[f"{kernel}_grad"].builder()(backward, (grad, *inputs, out, log_sum_exp, state), made),
    )

    def run() -> None:
        for each in runs:
            each()

    def gradients_of(state: Tensor) -> list[Tensor]:
        """Return output and gradients, in float64, with the mask that a state stands for."""
        extents = (HEADS["b"], HEADS["n"], HEADS["l"], HEADS["l"])
        kept = library_mask(LIBRARY[kernel], state, extents, 0.25)
        assert abs(float(kept.double().mean()) - 0.75) < 0.02
        query, key, value = leaves = [t.double().requires_grad_() for t in inputs if t is not None]
        scores = torch.einsum("bqnp,bknp->bnqk", query, key) * factor(forward.subgraph)
        wanted = torch.einsum("bnqk,bknp->bqnp", scores.softmax(-1) * kept / 0.75, value)
        return [wanted.detach(), *torch.autograd.grad(wanted, leaves, grad.double())]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    states = []
    for replays in (True, True, False):
        graph.replay() if replays else run()
        states.append(state.clone())
        for got, wanted in zip((out, *made), gradients_of(state), strict=True):
            assert got is not None
            error = (got.double() - wanted).abs().max() / wanted.square().mean().sqrt()
            assert float(error) < (1e-4 if dtype == "float32" else 0.1)
    assert len({tuple(each.tolist()) for each in states}) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("activation", ["gelu_erf", "gelu_tanh", "relu"])
def test_every_fused_set_by_rows_equals_the_reference_at_extents_that_nothing_divides(
    dtype: str, activation: str
) -> None:
    for extents in (ODD, EXTENTS | {"h": 51, "f": 77}, EXTENTS | {"b": 3, "l": 173, "h": 2056, "f": 1030}):
        found = sets(extents, dtype, activation=activation).values()
        several = [{"vector": 1}, {"vector": 2, "threads": 128, "rows": 4, "blocks": 2, "unroll": 4}]
        wanted = [declared(subgraph, **launch) for subgraph in found for launch in several]
        admitted = [c for c in wanted if KERNELS["cupy_rows"].refuses(c.subgraph, c.candidate) is None]
        assert verified(admitted) == {}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("extents", [ODD, EXTENTS | {"h": 51, "f": 77}, {"b": 8, "l": 512, "h": 1024, "f": 4096}])
def test_a_norm_in_float32_that_keeps_what_it_normalised_in_16_bits_equals_the_reference(
    dtype: str, extents: dict[str, int]
) -> None:
    found = sets_of(training_graph(mixed(dtype, {axis: extents[axis] for axis in "blhf"}).graph()))
    launches = [{"vector": 1}, {"vector": 4, "threads": 128, "rows": 2}, {"vector": 8, "threads": 64, "rows": 4}]
    wanted = [
        declared(subgraph, **launch)
        for kinds, subgraph in found.items() if any("normalised" in kind for kind in kinds)
        for launch in launches
    ]  # fmt: skip
    assert verified([c for c in wanted if KERNELS["cupy_rows"].refuses(c.subgraph, c.candidate) is None]) == {}


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_norm_that_is_made_anew_beside_its_gradients_equals_the_reference_in_every_run(order: str) -> None:
    subgraph = repeated_norm(8, 512, 1024, order)
    launches = [{"threads": t, "rows": r, "vector": 4} for t, r in ((64, 8), (128, 4), (256, 2))]
    calls = [declared(subgraph, **launch) for launch in launches]
    assert all(KERNELS["cupy_rows"].refuses(subgraph, call.candidate) is None for call in calls)
    for _ in range(5):
        assert verified(calls) == {}


@pytest.mark.gpu
def test_masks_of_bits_drawn_in_a_graph_differ_from_replay_to_replay() -> None:
    tensor = TensorType((100_001,), "bfloat16")
    nodes = tuple(Node("dropout_mask", "->a", (), (i,), (("p", p),)) for i, p in enumerate((0.1, 0.5)))
    call = Call(Subgraph(nodes, (tensor, tensor), (), (0, 1)), Candidate("cupy_mask_bits", ("a:bit", "a:bit")))
    assert verified([call]) == {}
    outputs = [torch.empty(12_501, dtype=torch.uint8, device="cuda") for _ in range(2)]
    run = KERNELS["cupy_mask_bits"].builder()(call, [], outputs)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(outputs[0].clone())
        kept = decoded(outputs[0], Form.parse("a:bit"), tensor, 0.1)
        assert float(kept.double().mean()) == pytest.approx(0.9, abs=6e-3)
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_relus_result_as_signs_equals_the_reference(dtype: str) -> None:
    space = build_space(layer(HEADS, dtype, activation="relu"), space_file("cuda"), saving=True)
    found = [call for call in space.calls.values() if any(text.endswith(":sign") for text in call.candidate.forms)]
    assert {call.candidate.kernel for call in found} == {"cupy_rows", "inductor", "inductor_pack_signs"}
    assert verified(found) == {}
