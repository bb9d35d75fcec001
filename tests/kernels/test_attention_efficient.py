"""What is asked of memory-efficient attention: of a stand-in on the CPU, since the library's own needs a GPU."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autotuner.ir.records import Call, Candidate
from autotuner.kernels import KERNELS
from autotuner.kernels.torch import attention_efficient
from autotuner.measure.operands import Buffers, Values
from autotuner.space import build_space, space_file
from autotuner.space.fusion import covers
from tests.kernels.calls import faults, layer
from tests.kernels.interpreted import adding
from tests.kernels.library import LIBRARY

HEADS = {"b": 2, "l": 24, "h": 64, "n": 4, "p": 16, "f": 128}
FORWARD, BACKWARD = "cuda_efficient_attention", "cuda_efficient_attention_grad"
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "causal": {"model": "gpt-block"}, "masked": {"attention_mask": True}}
SEED, OFFSET = 2**59 + 7, 40


class Library:
    """Stands in for torch's operators, without dropping, and insists on what they insist on."""

    def __init__(self) -> None:
        self.asked: list[Tensor | None] = []
        self.log_sum_exp = self.state = torch.empty(0)
        self.dropped: list[float] = []

    @staticmethod
    def scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
        found = query @ key.transpose(-1, -2) * scale
        if bias is not None:
            assert bias.shape == found.shape
            assert bias.stride(3) == 1
            assert not any(step % 4 for step in bias.stride()[:3])
            found = found + bias
        return found + torch.full_like(found, float("-inf")).triu(1) if causal else found

    def _scaled_dot_product_efficient_attention(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, saves: bool, p: float, causal: bool,
        *, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.asked = [query, key, value, bias]
        self.dropped.append(p)
        assert all(operand.stride(3) == 1 for operand in (query, key, value))
        scores = self.scores(query, key, bias, causal, scale)
        rows = -(-query.shape[2] // 32) * 32 if saves else 0
        log_sum_exp = torch.full((*query.shape[:2], rows), float("inf"))
        if saves:
            log_sum_exp[..., : query.shape[2]] = scores.float().logsumexp(-1)
        out = (scores.softmax(-1) @ value).transpose(1, 2).contiguous().transpose(1, 2)
        return out, log_sum_exp, torch.tensor(SEED), torch.tensor(OFFSET)

    def _scaled_dot_product_efficient_attention_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor,
        log_sum_exp: Tensor, seed: Tensor, offset: Tensor, p: float, wanted: Sequence[bool], causal: bool,
        *, scale: float,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        self.asked, self.log_sum_exp, self.state = [grad, query, key, value, bias, out], log_sum_exp, seed
        self.dropped.append(p)
        assert (seed.shape, offset.shape, wanted) == ((), (), [True, True, True, False])
        assert grad.transpose(1, 2).is_contiguous()
        assert out.transpose(1, 2).is_contiguous()
        assert log_sum_exp.shape[2] % 32 == 0
        weights = (
            self.scores(query, key, bias, causal, scale) - log_sum_exp[..., : query.shape[2]].unsqueeze(-1)
        ).exp()
        change = weights * (grad @ value.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
        found = change @ key, change.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad
        return *(g.transpose(1, 2).contiguous().transpose(1, 2) for g in found), None


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(attention_efficient, "aten", made)
    return made


def calls(
    kernel: str, extents: dict[str, int] = HEADS, dtype: str = "float32", p: float = 0.0, **options: Any
) -> list[Call]:
    """Return the calls of a kernel on a layer in every layout that its rule enumerates and does not refuse."""
    graph = layer(extents, dtype, p=p, **options)
    named = {operator.name: operator for operator in graph.operators}
    found = []
    for cover in covers(graph, (*LIBRARY, *(f"{name}_grad" for name in LIBRARY))):
        if kernel in cover.kernels:
            members = [named[name] for name in cover.recomputed + cover.operators]
            subgraph = graph.subgraph(members, cover.inputs, cover.outputs)
            rows = (Candidate(kernel, row) for row in KERNELS[kernel].layouts(subgraph))
            found += [Call(subgraph, row) for row in rows if KERNELS[kernel].refuses(subgraph, row) is None]
    return found


def built(call: Call) -> tuple[list[Tensor], list[Tensor], Any]:
    """Return a call's inputs and outputs, and its run."""
    values, buffers = Values(call.subgraph), Buffers()
    inputs, outputs = buffers.inputs(call, values, 0), buffers.outputs(call, values, 0)
    found = [[tensor for tensor in side if tensor is not None] for side in (inputs, outputs)]
    return found[0], found[1], KERNELS[call.candidate.kernel].builder()(call, inputs, outputs)


@pytest.mark.slow
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("kernel", [FORWARD, BACKWARD])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [24, 32])
def test_every_call_equals_the_reference_if_the_library_does(kernel: str, kind: str, rows: int) -> None:
    space = build_space(layer(HEADS | {"l": rows}, "float32", p=0.0, **KINDS[kind]), space_file("cuda"))
    found = [call for call in space.calls.values() if call.candidate.kernel == kernel]
    assert len(found) >= 5
    assert faults(found) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("kinds", ["mask+causal_mask", "mask+window_mask", "window_mask"])
def test_a_mask_of_keys_goes_with_a_causal_one_and_a_window(kinds: str) -> None:
    graph = adding(kinds, "bk" if "+" in kinds else "", "bqnp", length=24)
    wide = {name: replace(tensor, dtype="float32") for name, tensor in graph.tensors.items()}  # as the stand-in is
    space = build_space(replace(graph, tensors=wide), space_file("cuda"))
    found = [call for call in space.calls.values() if call.candidate.kernel in (FORWARD, BACKWARD)]
    assert {call.candidate.kernel for call in found} == {FORWARD, BACKWARD}
    assert all({*kinds.split("+")} <= {*call.subgraph.kinds} for call in found)
    assert faults(found) == {}


def test_operands_are_handed_over_as_they_lie(library: Library) -> None:
    for kernel, first in ((FORWARD, 0), (BACKWARD, 1)):
        for call in calls(kernel, attention_mask=True):
            inputs, _, run = built(call)
            run()
            *_, bias = library.asked[: first + 4]
            own = [*inputs[: first + 3], inputs[-1]]
            asked = library.asked[: first + 4]
            assert [t.data_ptr() for t in asked if t is not None] == [t.data_ptr() for t in own]
            assert bias is not None
            assert bias.stride() == (24, 0, 0, 1)


@pytest.mark.slow
def test_rows_of_the_log_sum_exp_that_the_library_adds_are_left_off_and_put_back(library: Library) -> None:
    forward, backward = calls(FORWARD)[0], calls(BACKWARD)[0]
    _, outputs, run = built(forward)
    run()
    assert outputs[1].shape == (2, 4, 24)
    inputs, _, run = built(backward)
    run()
    assert torch.equal(library.log_sum_exp[..., :24], inputs[5])
    assert bool((library.log_sum_exp[..., 24:] == float("inf")).all())
    inputs, _, run = built(calls(BACKWARD, HEADS | {"l": 32})[0])
    run()
    assert library.log_sum_exp.data_ptr() == inputs[5].data_ptr()


def test_seed_and_offset_are_kept_for_backward(library: Library) -> None:
    forward, backward = (calls(kernel, p=0.25)[0] for kernel in (FORWARD, BACKWARD))
    assert forward.candidate.forms[-1] == backward.candidate.forms[6] == "abcd:efficient"
    _, outputs, run = built(forward)
    run()
    assert outputs[2].tolist() == [SEED, OFFSET]
    inputs, _, run = built(backward)
    inputs[6].copy_(outputs[2])
    run()
    assert int(library.state) == SEED
    assert library.dropped == [0.25, 0.25]


class OnDevice:
    """Stands in for a state on a device: counts how often it is brought to the host."""

    is_cuda = True

    def __init__(self) -> None:
        self.brought = 0
        self.filled: list[int] = []

    def cpu(self) -> list[int]:
        self.brought += 1
        return [SEED, OFFSET]

    def __getitem__(self, place: int) -> Any:
        return SimpleNamespace(place=place, fill_=self.filled.append)


def test_only_outside_of_a_graph_is_the_state_brought_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for capturing, brought in ((False, 1), (True, 0)):
        state = OnDevice()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        attention_efficient._readable(state)  # type: ignore[arg-type]
        assert state.brought == brought


def test_a_state_that_the_library_has_on_the_host_is_written_as_two_numbers() -> None:
    state = OnDevice()
    attention_efficient._keep(torch.tensor(SEED), torch.tensor(OFFSET), state)  # type: ignore[arg-type]
    assert state.filled == [SEED, OFFSET]


def reason(call: Call, forms: Sequence[str]) -> str | None:
    return KERNELS[call.candidate.kernel].refuses(call.subgraph, Candidate(call.candidate.kernel, tuple(forms)))


def test_it_is_offered_for_float32_and_16_bits_where_heads_can_be_loaded() -> None:
    for dtype, features, offered in (
        ("float32", 4, True), ("float32", 6, False), ("bfloat16", 8, True), ("float16", 136, True),
        ("bfloat16", 12, False), ("float64", 8, False),
    ):  # fmt: skip
        for kernel in (FORWARD, BACKWARD):
            assert bool(calls(kernel, HEADS | {"p": features}, dtype)) == offered, (dtype, features)


def test_a_mask_is_added_where_its_keys_can_be_loaded() -> None:
    for rows, dtype, offered in ((24, "bfloat16", True), (20, "bfloat16", False), (20, "float32", True)):
        for kernel in (FORWARD, BACKWARD):
            found = calls(kernel, HEADS | {"l": rows}, dtype, attention_mask=True)
            assert bool(found) == offered, (rows, dtype)
    (call, *_) = calls(FORWARD, attention_mask=True)
    assert call.candidate.forms[3] == "ab"
    forms = [*call.candidate.forms[:3], "ba", *call.candidate.forms[4:]]
    assert reason(call, forms) == "it adds a mask whose keys are contiguous; this one lies as ba"
    for kernel in ("cuda_flash_attention", "cudnn_attention"):
        assert calls(kernel, dtype="bfloat16")
        assert calls(kernel, dtype="bfloat16", attention_mask=True) == []


def test_what_would_be_copied_is_refused_in_a_sentence() -> None:
    call, back = calls(FORWARD, p=0.25)[0], calls(BACKWARD, p=0.25)[0]
    assert reason(call, call.candidate.forms) is reason(back, back.candidate.forms) is None
    scattered = reason(call, ["abdc", *call.candidate.forms[1:]])
    assert scattered == "the library copies tensor 0: features are not contiguous in abdc"
    moved = [*back.candidate.forms[:4], "acbd", *back.candidate.forms[5:]]
    assert reason(back, moved) == "the library copies tensor 4: it reads abcd, and this lies as acbd"
    plain = [text.replace(":efficient", "") for text in call.candidate.forms]
    assert reason(call, plain) == "its mask is of its own generator, efficient; abcd is not"
    other = [text.replace(":efficient", ":flash") for text in call.candidate.forms]
    assert reason(call, other) == f"{FORWARD} reads and writes tensors by their strides, and abcd:flash has none"
