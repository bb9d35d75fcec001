"""What is asked of cuDNN's front end: seen by a stand-in for it, since attention itself needs a GPU."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autotuner.ir.records import Call
from autotuner.kernels.cudnn import attention as attention_cudnn
from autotuner.kernels.registry import KERNELS
from autotuner.measure.operands import Buffers, Values
from autotuner.space import build_space, space_file
from tests.kernels.calls import layer

HEADS = {"b": 2, "l": 24, "h": 64, "n": 4, "p": 16, "f": 128}


class FakeTensor:
    """A tensor of the library's graph: its name, and where it is said to lie."""

    def __init__(self, name: str, **lies: Any) -> None:
        self.name, self.lies = name, lies

    def set_output(self, _: bool) -> "FakeTensor":
        return self

    def set_dim(self, extents: list[int]) -> "FakeTensor":
        self.lies["dim"] = extents
        return self

    def set_stride(self, strides: list[int]) -> "FakeTensor":
        self.lies["stride"] = strides
        return self

    def set_data_type(self, kind: str) -> "FakeTensor":
        self.lies["data_type"] = kind
        return self


class FakeGraph:
    """Stands in for a graph of the library: keeps what it is given, and computes nothing."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.made: list[FakeTensor] = []
        self.executed: list[Mapping[FakeTensor, int]] = []

    def tensor(self, name: str, **lies: Any) -> FakeTensor:
        return FakeTensor(name, **lies)

    def sdpa(self, **asked: Any) -> list[FakeTensor]:
        self.asked = asked
        self.made = [FakeTensor("o"), FakeTensor("stats")]
        return self.made

    def sdpa_backward(self, **asked: Any) -> list[FakeTensor]:
        self.asked = asked
        self.made = [FakeTensor(name) for name in ("dQ", "dK", "dV")]
        return self.made

    def nothing(self, *_: Any) -> None:
        pass

    validate = build_operation_graph = create_execution_plans = check_support = build_plans = nothing

    def get_workspace_size(self) -> int:
        return 64

    def execute(self, pointers: Mapping[FakeTensor, int], workspace: int, handle: int) -> None:
        assert workspace
        assert handle == 5
        self.executed.append(pointers)


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> FakeGraph:
    made = FakeGraph()
    kinds = SimpleNamespace(BFLOAT16="bf16", HALF="half", FLOAT="float", INT64="int64")
    library = SimpleNamespace(
        data_type=kinds, heur_mode=SimpleNamespace(A=0, FALLBACK=1), pygraph=lambda **_: made,
        cudnnGraphNotSupportedError=RuntimeError, set_stream=lambda **_: None,
    )  # fmt: skip
    monkeypatch.setattr(attention_cudnn, "_handle", lambda _: (library, 5))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    attention_cudnn._built.cache_clear()
    return made


def built(kernel: str, stacked: bool) -> tuple[Call, list[Tensor], list[Tensor], Any]:
    """Return a call of a layer, its inputs and outputs, and its run."""
    space = build_space(layer(HEADS, "bfloat16"), space_file("cuda"))
    slices = (6 if kernel.endswith("_grad") else 3) if stacked else 0
    call = next(
        c for c in space.calls.values()
        if c.candidate.kernel == kernel and sum("@" in text for text in c.candidate.forms) == slices
    )  # fmt: skip
    values, buffers = Values(call.subgraph), Buffers()
    inputs, outputs = buffers.inputs(call, values, 0), buffers.outputs(call, values, 0)
    found = [[tensor for tensor in side if tensor is not None] for side in (inputs, outputs)]
    return call, *found, KERNELS[kernel].builder()(call, inputs, outputs)  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True])
def test_forward_reads_and_writes_operands_where_and_as_they_lie(graph: FakeGraph, stacked: bool) -> None:
    _, inputs, outputs, run = built("cudnn_attention", stacked)
    before = outputs[2].clone()
    run()
    (pointers,) = graph.executed
    by_name = {tensor.name: (pointer, tensor.lies) for tensor, pointer in pointers.items()}
    for name, tensor in zip("qkv", inputs, strict=True):
        pointer, lies = by_name[name]
        assert pointer == tensor.data_ptr()
        turned = tensor.permute(0, 2, 1, 3)
        assert (lies["dim"], lies["stride"]) == (list(turned.shape), list(turned.stride()))
    assert by_name["o"][0] == outputs[0].data_ptr()
    assert by_name["stats"][0] == outputs[1].data_ptr()
    assert by_name["stats"][1]["dim"] == [2, 4, 24, 1]
    assert by_name["seed"][0] == outputs[2].data_ptr()
    assert not torch.equal(outputs[2], before)
    share, seed, offset = graph.asked["dropout"]
    assert (share, seed.name, offset.name) == (0.25, "seed", "offset")
    assert graph.asked["attn_scale"] == 0.25
    assert graph.asked["use_causal_mask"] is False


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True])
def test_backward_writes_gradients_where_and_as_they_lie_and_draws_nothing(graph: FakeGraph, stacked: bool) -> None:
    _, inputs, outputs, run = built("cudnn_attention_grad", stacked)
    before = inputs[6].clone()
    run()
    (pointers,) = graph.executed
    by_name = {tensor.name: (pointer, tensor.lies) for tensor, pointer in pointers.items()}
    named = dict(zip(("dO", "q", "k", "v", "o"), inputs, strict=False))
    named |= dict(zip(("dQ", "dK", "dV"), outputs, strict=True))
    for name, tensor in named.items():
        pointer, lies = by_name[name]
        assert pointer == tensor.data_ptr(), name
        assert lies["stride"] == list(tensor.permute(0, 2, 1, 3).stride()), name
    assert by_name["seed"][0] == inputs[6].data_ptr()
    assert torch.equal(inputs[6], before)


@pytest.mark.slow
def test_operands_that_lie_alike_share_one_plan(graph: FakeGraph) -> None:
    for _ in range(2):
        built("cudnn_attention", False)[-1]()
    assert attention_cudnn._built.cache_info().misses == 1
    first, second = graph.executed
    assert list(first) == list(second)
