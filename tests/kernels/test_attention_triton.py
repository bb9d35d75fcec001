"""Attention by Triton programs: rules everywhere, results in Triton's interpreter and on a CUDA device."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from autotuner.ir.form import Form
from autotuner.ir.records import Call, Candidate, TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.rules.attention import added_mask
from autotuner.kernels.rules.attention_triton import WIDE, dropped_by_bits, kept_levels
from autotuner.kernels.torch.attention import factor
from autotuner.kernels.torch.formats import decoded
from autotuner.measure.operands import Buffers, Values
from autotuner.measure.verification import References, fault
from autotuner.space import build_space, space_file
from tests.kernels.calls import interpreted, layer
from tests.kernels.interpreted import ADDED, CASES, adding, calls, calls_in

HEADS = {"b": 2, "l": 96, "h": 64, "n": 4, "p": 16, "f": 128}
FORWARD, BACKWARD = "triton_attention", "triton_attention_grad"


def offered(dtype: str, rows: int, features: int, p: float) -> set[str]:
    """Return the kernels that are offered in a layer."""
    extents = HEADS | {"l": rows, "p": features, "h": HEADS["n"] * features}
    return {kernel for kernel, found in calls(extents, dtype, p=p).items() if found}


@pytest.mark.parametrize(
    ("dtype", "rows", "features", "p", "fits"),
    [
        ("bfloat16", 96, 16, 0.25, True), ("float16", 32, 128, 0.1, True), ("float16", 37, 64, 0.0, True),
        ("float16", 37, 16, 0.25, False), ("float32", 96, 16, 0.25, False), ("float16", 96, 24, 0.25, False),
    ],
)  # fmt: skip
def test_attention_by_bits_is_offered_for_whole_words_of_keys_and_powers_of_two_of_features(
    dtype: str, rows: int, features: int, p: float, fits: bool
) -> None:
    assert offered(dtype, rows, features, p) == ({FORWARD, BACKWARD} if fits else set())


@pytest.mark.parametrize("kernel", [FORWARD, BACKWARD])
def test_what_it_does_not_compute_is_refused_in_a_sentence(kernel: str) -> None:
    call = calls(HEADS, "bfloat16", p=0.25)[kernel][0]

    def reason(change: Callable[[Candidate], Candidate] = lambda c: c, p: float = 0.25) -> str | None:
        nodes = (replace(n, attributes=(("p", p),)) if "dropout" in n.kind else n for n in call.subgraph.nodes)
        return KERNELS[kernel].refuses(replace(call.subgraph, nodes=tuple(nodes)), change(call.candidate))

    def tiles(**changed: int) -> Callable[[Candidate], Candidate]:
        return lambda c: replace(c, params=tuple((dict(c.params) | changed).items()))

    rows = "rows" if kernel == FORWARD else "key_rows"
    warps, side = ("warps", "rows") if kernel == FORWARD else ("key_warps", "key_columns")
    columns = "columns" if kernel == FORWARD else "key_columns"
    assert reason() is None
    assert reason(p=1e-9) == "it keeps whole 65536ths of the weights: none or all of them where p is 1e-09"
    assert reason(tiles(**{rows: 48})) == f"{rows} is a power of 2; given: 48"
    assert reason(tiles(**{rows: 512})) == f"{rows} is one of 16, 32, 64, 128, 256; given: 512"
    assert reason(tiles(**{columns: 32})) == f"{columns} is one of 64, 128; given: 32"
    assert reason(tiles(**{warps: 0})) == f"{warps} is a power of 2; given: 0"
    assert reason(tiles(**{warps: 8})) == f"a warp computes 16 of the {side} or more; 8 share 64"
    assert str(reason(lambda c: replace(c, params=c.params[1:]))).startswith("it takes the parameters ")
    raw = reason(lambda c: replace(c, forms=tuple(text.replace(":bit", "") for text in c.forms)))
    assert raw == "its mask is of bits, in declared order; abcd is not"


@pytest.mark.slow
def test_tiles_of_wide_heads_fit_into_shared_memory_or_are_refused() -> None:
    """Those of 64 rows and 3 stages of 64 keys did not on an H200: 294,912 bytes of 232,448."""
    name, extents = f"{WIDE}_grad", HEADS | {"n": 1, "p": 256, "h": 256}
    call = calls(extents, "bfloat16", p=0.0)[name][0]
    changed = replace(call.candidate, params=tuple((dict(call.candidate.params) | {"stages": 3}).items()))
    assert KERNELS[name].refuses(call.subgraph, call.candidate) is None
    assert KERNELS[name].refuses(call.subgraph, changed) == (
        "64 query_rows and 3 stages of 64 query_columns take 262,144 bytes of shared memory; a program has 232,448 "
        "at most"
    )
    assert not calls(extents, "bfloat16", p=0.0)[BACKWARD]
    tried = [dict(each.candidate.params) for each in in_space("bfloat16", 128, 256, p=0.0)[name]]
    assert {(each["query_rows"], each["query_columns"]) for each in tried} == {(64, 32), (64, 64), (128, 32)}


LONG = {"b": 1, "l": 32_768, "h": 65_536, "n": 512, "p": 128, "f": 128}
"""A query of 2**31 elements."""


@pytest.mark.parametrize(
    ("changed", "admitted"),
    [({}, {FORWARD, BACKWARD}), ({"l": 33_024}, set()), ({"b": 100, "l": 4096}, {FORWARD, BACKWARD})],
)
def test_operands_that_reach_further_than_32_bits_count_are_refused(
    changed: dict[str, int], admitted: set[str]
) -> None:
    """Within a batch entry: the batch itself is counted in 64 bits."""
    found = calls(LONG | changed, "bfloat16", p=0.0)
    assert {kernel for kernel, fits in found.items() if fits} == admitted


@pytest.mark.parametrize("kernel", [FORWARD, BACKWARD])
def test_the_reason_names_the_operand_that_reaches_too_far(kernel: str) -> None:
    call = calls(LONG, "bfloat16", p=0.0)[kernel][0]
    tensors = (
        replace(tensor, extents=tuple(33_024 if extent == 32_768 else extent for extent in tensor.extents))
        for tensor in call.subgraph.tensors
    )
    reason = KERNELS[kernel].refuses(replace(call.subgraph, tensors=tuple(tensors)), call.candidate)
    assert re.fullmatch(
        r"it counts at most 2,147,483,647 elements within a batch entry; tensor \d+ reaches over 2,16[\d,]+ in \S+",
        str(reason),
    )


@pytest.mark.parametrize("kernel", [FORWARD, BACKWARD])
def test_a_bias_has_its_keys_side_by_side(kernel: str) -> None:
    """With keys 16 heads apart, as T5 makes it, forward took 205 us or more on an H200, and 40 us without a bias."""
    own = calls_in(adding("bias", "qkn", "bqnp", length=64))[kernel]
    subgraph, candidate = own[0].subgraph, own[0].candidate
    number, _ = added_mask(subgraph)
    assert number is not None
    place = subgraph.boundary.index(number)
    assert {call.candidate.forms[place] for call in own} == {"cab"}
    declared = replace(candidate, forms=(*candidate.forms[:place], "abc", *candidate.forms[place + 1 :]))
    reason = f"it adds what has its keys side by side: tensor {number} lies as abc"
    assert KERNELS[kernel].refuses(subgraph, declared) == reason


@pytest.mark.parametrize(("p", "levels"), [(0.1, 58982), (0.5, 32768), (0.25, 49152), (0.9, 6554)])
def test_the_share_that_is_kept_is_rounded_to_65536ths(p: float, levels: int) -> None:
    assert kept_levels(p) == levels
    assert abs(dropped_by_bits(p) - p) <= 2**-17


@pytest.mark.slow
def test_programs_equal_the_reference_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    found = interpreted("tests.kernels.interpreted")
    expected: dict[str, object] = {
        f"{case}: {name}{side}": {}
        for case in (*CASES, *ADDED, "wide tiles")
        for name in (WIDE if case == "heads of 256 features" else FORWARD,)
        for side in ("", "_grad")
    }
    assert found == expected | {"all keys hidden": {}, "keys hidden by a bias": {}}


WINDOWS = {
    "FEATURES": 32, "ROWS": 64, "COLUMNS": 64, "EVEN": False, "CAUSAL": False, "WINDOW": False, "GROUP": 1,
    "CAPS": False, "ADDS": True, "OVER_ROWS": True, "HIDES": True, "HIDES_ROWS": True, "SINKS": False, "SAVES": True,
    "DROPS": False, "KEPT": 0, "PACKS": True, "BATCHES": 4096, "HEADS": 1, "PARTS": 128,
}  # fmt: skip
"""Attention in windows, with a bias and a mask."""
KNOWN = {
    **dict.fromkeys(("query", "key", "value", "out", "gradient", "added", "hides"), "*bf16"),
    **dict.fromkeys(("log_sum_exp", "statistics", "into"), "*fp32"),
    **dict.fromkeys(("factor", "cap", "kept", "kept_inverse"), "fp32"), "words": "*i32", "seed": "*i64",
    "sinks": "*bf16",
}  # fmt: skip
"""Types of what programs are given, but for strides and extents."""


@pytest.mark.slow
@pytest.mark.parametrize("beside", [{}, {"SINKS": True, "WINDOW": True}])
def test_programs_with_a_bias_and_a_mask_compile_for_hopper(beside: dict[str, bool]) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from autotuner.kernels.triton import attention_backward, attention_forward

    backward = (attention_backward.query_gradient, attention_backward.key_value_gradient)
    for program in (attention_forward.forward, *backward, attention_backward.bias_gradient):
        constants = {name: value for name, value in (WINDOWS | beside).items() if name in program.arg_names}
        types = dict.fromkeys(constants, "constexpr")
        for name in program.arg_names[: -len(constants)]:
            types[name] = KNOWN.get(name.removeprefix("into_"), "i32")
        source = ASTSource(program, types, constants)
        text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
        assert "mma" in text


@cache
def in_space(dtype: str, rows: int, features: int, **options: float | str | bool) -> dict[str, list[Call]]:
    """Return the calls of both kernels in the search space of a layer."""
    name = WIDE if features == 256 else FORWARD
    found: dict[str, list[Call]] = {name: [], f"{name}_grad": []}
    extents = HEADS | {"l": rows, "p": features, "h": HEADS["n"] * features}
    graph = layer(extents, dtype, **options)  # type: ignore[arg-type]
    for call in build_space(graph, space_file("cuda")).calls.values():
        if call.candidate.kernel in found:
            found[call.candidate.kernel].append(call)
    return found


def verified(found: list[Call]) -> dict[str, str]:
    """Return what is wrong with calls on the CUDA device, by call."""
    wrong = {}
    device = torch.device("cuda")
    for call in found:
        kernel = KERNELS[call.candidate.kernel]
        values, buffers = Values(call.subgraph, kernel.consistent, device), Buffers(device)
        inputs, outputs = buffers.inputs(call, values, 0), buffers.outputs(call, values, 0)
        run = kernel.builder()(call, inputs, outputs)
        reason = fault(call, kernel, run, values, References(), inputs, outputs)
        if reason:
            wrong[f"{call.candidate}"] = reason
    return wrong


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", [{}, {"model": "gpt-block"}, {"attention_mask": True}])
@pytest.mark.parametrize(("rows", "p"), [(96, 0.25), (128, 0.1), (37, 0.0), (512, 0.1)])
def test_programs_equal_the_reference(dtype: str, options: dict[str, bool], rows: int, p: float) -> None:
    for kernel, found in in_space(dtype, rows, 64 if rows == 512 else 16, p=p, **options).items():
        assert len(found) >= 5, kernel
        assert verified(found) == {}, kernel


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"model": "gpt-block"}, {"attention_mask": True}])
@pytest.mark.parametrize(("rows", "p"), [(128, 0.1), (37, 0.0), (512, 0.0)])
def test_programs_of_wide_heads_equal_the_reference(options: dict[str, bool], rows: int, p: float) -> None:
    for kernel, found in in_space("bfloat16", rows, 256, p=p, **options).items():
        assert len(found) >= 4, kernel
        assert verified(found) == {}, kernel


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_each_replay_of_a_graph_draws_other_bits_and_backward_drops_by_them(dtype: str) -> None:
    device = torch.device("cuda")
    forward, backward = (
        next(c for c in found if all(text[:4] in ("abcd", "abc") for text in c.candidate.forms))
        for found in in_space(dtype, HEADS["l"], HEADS["p"], p=0.25).values()
    )
    values, buffers = Values(forward.subgraph, "", device), Buffers(device)
    inputs, (out, log_sum_exp, bits) = buffers.inputs(forward, values, 0), buffers.outputs(forward, values, 0)
    made = Buffers(device).outputs(backward, Values(backward.subgraph, "", device), 0)
    assert out is not None
    assert bits is not None
    grad = torch.randn_like(out)
    runs = (
        KERNELS[FORWARD].builder()(forward, inputs, (out, log_sum_exp, bits)),
        KERNELS[BACKWARD].builder()(backward, (grad, *inputs, out, log_sum_exp, bits), made),
    )

    def run() -> None:
        for each in runs:
            each()

    def gradients_of(bits: Tensor) -> list[Tensor]:
        """Return output and gradients, in float64, with the mask that bits stand for."""
        extents = (HEADS["b"], HEADS["n"], HEADS["l"], HEADS["l"])
        kept = decoded(bits, Form.parse("abcd:bit"), TensorType(extents, dtype), 0.25)
        assert abs(float(kept.double().mean()) - 0.75) < 0.02
        query, key, value = leaves = [t.double().requires_grad_() for t in inputs if t is not None]
        scores = torch.einsum("bqnp,bknp->bnqk", query, key) * factor(forward.subgraph)
        wanted = torch.einsum("bnqk,bknp->bqnp", scores.softmax(-1) * kept / 0.75, value)
        return [wanted.detach(), *torch.autograd.grad(wanted, leaves, grad.double())]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    drawn = []
    for replays in (True, True, False):
        graph.replay() if replays else run()
        drawn.append(bits.clone())
        for got, wanted in zip((out, *made), gradients_of(bits), strict=True):
            assert got is not None
            error = (got.double() - wanted).abs().max() / wanted.square().mean().sqrt()
            assert float(error) < 0.1
    for one, other in ((0, 1), (1, 2), (0, 2)):
        differing = decoded(
            drawn[one] ^ drawn[other], Form.parse("a:bit"), TensorType((bits.numel() * 8,), dtype), 0.25
        )
        assert abs(float(differing.double().mean()) - 2 * 0.25 * 0.75) < 0.02  # independent draws
