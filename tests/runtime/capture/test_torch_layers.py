"""Stacks of torch's own layers, called as people call them: each layer is one region, and computes what it did."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.capture.known import Compilation, assert_equal, gradients

BATCH, LENGTH, MEMORY, WIDTH, HEADS, LAYERS = 3, 6, 5, 16, 2, 3
Given = dict[str, Tensor | bool]


def padded(length: int, hidden: tuple[int, ...] = (0, 2, 3)) -> Tensor:
    """Return a boolean mask that hides so many keys at the end of each sequence."""
    return torch.arange(length) >= length - torch.tensor(hidden)[:, None]


def later(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def infinite(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)


ALL_BUT_ONE = (LENGTH, 0, 2)
"""Keys that are hidden in each sequence: the first one is all padding."""
ENCODERS: dict[str, list[Given]] = {
    "padded": [{"src_key_padding_mask": padded(LENGTH, hidden)} for hidden in ((0, 2, 3), (1, 0, 5), ALL_BUT_ONE)],
    "padded, additive": [{"src_key_padding_mask": infinite(padded(LENGTH, each))} for each in ((0, 2, 3), ALL_BUT_ONE)],
    "causal": [
        {"mask": later(LENGTH)},
        {"mask": later(LENGTH).T.contiguous()},
        {"mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu()},
    ],
    "causal, additive": [{"mask": infinite(later(LENGTH))}, {"mask": torch.randn(LENGTH, LENGTH).double()}],
    "causal by hint": [{"mask": infinite(later(LENGTH)), "is_causal": True}],
    "causal and padded": [
        {"mask": later(LENGTH), "src_key_padding_mask": padded(LENGTH, hidden).flip(-1)}
        for hidden in ((0, 2, 3), ALL_BUT_ONE)
    ],
    "for each head": [
        {"mask": torch.rand(BATCH * HEADS, LENGTH, LENGTH) > 0.6, "src_key_padding_mask": padded(LENGTH, ALL_BUT_ONE)}
    ],
}
DECODERS: dict[str, list[Given]] = {
    "plain": [{}],
    "causal and padded": [
        {"tgt_mask": later(LENGTH), "memory_key_padding_mask": padded(MEMORY, hidden)}
        for hidden in ((0, 2, 3), (MEMORY, 0, 1))
    ],
    "causal by hint": [
        {"tgt_mask": infinite(later(LENGTH)), "tgt_is_causal": True, "memory_key_padding_mask": padded(MEMORY)}
    ],
    "all masks": [
        {"tgt_mask": later(LENGTH), "tgt_key_padding_mask": padded(LENGTH, hidden),
         "memory_mask": torch.rand(LENGTH, MEMORY) > 0.7, "memory_key_padding_mask": padded(MEMORY)}
        for hidden in ((0, 2, 3), ALL_BUT_ONE)
    ],
}  # fmt: skip


def check(model: nn.Module, inputs: tuple[Tensor, ...], calls: list[Given], regions: int = LAYERS) -> Compilation:
    """Check regions and each gradient of a model, in float64 and without dropout, for each of some masks in turn."""
    model.double()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    compilation = Compilation(model)
    for given in calls:
        found, wanted = (_gradients(model, called, inputs, given) for called in (compilation.model, model))
        assert_equal(found, wanted, 1e-12)
    assert [graph.tuned_places for graph in compilation.compiled] == [regions]
    assert [region.calls for region in compilation.regions] == [len(calls)] * regions
    return compilation


def _gradients(model: nn.Module, called: Any, inputs: tuple[Tensor, ...], given: Given) -> dict[str, Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]

    def loss(call: Any) -> Tensor:
        y: Tensor = call(*leaves, **given)
        return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()

    found = gradients(model, loss, called)
    return found | {f"input {number}": leaf.grad for number, leaf in enumerate(leaves) if leaf.grad is not None}


def kinds(compilation: Compilation) -> set[str]:
    return {o.kind for each in compilation.regions for o in each.plan.configuration.model.graph().operators}


def drawn(*lengths: int, batch_first: bool) -> tuple[Tensor, ...]:
    return tuple(
        torch.randn(*((BATCH, length) if batch_first else (length, BATCH)), WIDTH).double() for length in lengths
    )


@pytest.mark.slow
@pytest.mark.parametrize("first", [(True, False), (False, True)], ids=["batch first", "norm and length first"])
@pytest.mark.parametrize("calls", ENCODERS.values(), ids=ENCODERS)
def test_each_layer_of_an_encoder_is_a_region(calls: list[Given], first: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    batch_first, norm_first = first
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=batch_first, norm_first=norm_first)
    check(nn.TransformerEncoder(layer, LAYERS), drawn(LENGTH, batch_first=batch_first), calls)


@pytest.mark.slow
@pytest.mark.parametrize("first", [(True, False), (False, True)], ids=["batch first", "norm and length first"])
@pytest.mark.parametrize("calls", DECODERS.values(), ids=DECODERS)
def test_each_layer_of_a_decoder_is_a_region(calls: list[Given], first: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    batch_first, norm_first = first
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 32, batch_first=batch_first, norm_first=norm_first)
    check(nn.TransformerDecoder(layer, LAYERS), drawn(LENGTH, MEMORY, batch_first=batch_first), calls)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 6])
def test_each_layer_of_torchs_transformer_is_a_region(layers: int) -> None:
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, HEADS, layers, layers, 32)
    mask = nn.Transformer.generate_square_subsequent_mask(MEMORY)
    given: Given = {"tgt_mask": mask, "src_key_padding_mask": padded(LENGTH), "memory_key_padding_mask": padded(LENGTH)}
    check(model, drawn(LENGTH, MEMORY, batch_first=False), [given], 2 * layers)


class Block(nn.Module):
    """A layer of its own making, around torch's attention."""

    def __init__(self, crosses: bool, batch_first: bool, **given: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
        self.cross = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first) if crosses else None
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.inner = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.given = given

    def forward(self, x: Tensor, memory: Tensor | None, hidden: Tensor | None, of_memory: Tensor | None) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, key_padding_mask=hidden, **self.given)[0]
        if self.cross is not None:
            y = self.norms[1](x)
            x = x + self.cross(y, memory, memory, key_padding_mask=of_memory, **self.given)[0]
        found: Tensor = x + self.inner(self.norms[2](x))
        return found


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(LAYERS))

    def forward(
        self, x: Tensor, memory: Tensor | None = None, hidden: Tensor | None = None, of_memory: Tensor | None = None
    ) -> Tensor:
        for block in self.blocks:
            x = block(x, memory, hidden, of_memory)
        return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "crosses", "batch_first"),
    [
        ({}, True, True),
        ({}, True, False),
        ({}, False, False),
        ({"need_weights": False}, True, True),
        ({"need_weights": False}, False, True),
        ({"average_attn_weights": False}, True, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("masks", [False, True], ids=["open", "padded"])
def test_each_block_around_torchs_attention_is_a_region(
    masks: bool, given: dict[str, bool], crosses: bool, batch_first: bool
) -> None:
    torch.manual_seed(0)
    model = Stack(lambda: Block(crosses, batch_first, **given))
    inputs = drawn(*((LENGTH, MEMORY) if crosses else (LENGTH,)), batch_first=batch_first)
    calls: list[Given] = [{}]
    if masks:
        calls = [{"hidden": padded(LENGTH), "of_memory": padded(MEMORY)}]
        calls.append({"hidden": padded(LENGTH, (3, 1, 0)), "of_memory": padded(MEMORY, (1, 4, 0))})
    if masks and given.get("need_weights") is False:  # with its weights, torch's own gives NaN where all is padding
        calls.append({"hidden": padded(LENGTH, ALL_BUT_ONE), "of_memory": padded(MEMORY, (0, MEMORY, 1))})
    check(model, inputs, calls)


class Causal(nn.Module):
    """An encoder that makes its mask itself, in one of two ways."""

    def __init__(self, additive: bool) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True), LAYERS)
        self.additive = additive

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        found: Tensor = self.layers(x, mask=mask if self.additive else mask != 0)
        return found


@pytest.mark.slow
@pytest.mark.parametrize("additive", [True, False], ids=["additive", "boolean"])
def test_a_causal_mask_that_a_model_makes_is_known_as_one(additive: bool) -> None:
    torch.manual_seed(0)
    compilation = check(Causal(additive), drawn(LENGTH, batch_first=True), [{}])
    assert {"causal_mask", "softmax"} <= kinds(compilation)
    assert not {"mask", "row_mask"} & kinds(compilation)


def test_attention_whose_weights_are_read_is_left_to_torch() -> None:
    class Reads(Block):
        def forward(self, x: Tensor, *_: Any) -> Tensor:
            y, weights = self.attention(x, x, x)
            found: Tensor = self.inner(x + y) * weights.amax()
            return found

    torch.manual_seed(0)
    model, (x,) = Stack(lambda: Reads(False, True)), drawn(LENGTH, batch_first=True)
    model.double()
    compilation = Compilation(model)
    assert_equal(_gradients(model, compilation.model, (x,), {}), _gradients(model, model, (x,), {}), 1e-12)
    (graph,) = compilation.compiled
    assert any("the weights of its attention are read: need_weights=False" in reason for reason in graph.reasons)
    assert "softmax" not in kinds(compilation)


@pytest.mark.slow
def test_all_padding_gives_what_torch_gives_where_attention_returns_its_weights() -> None:
    torch.manual_seed(0)
    model, (x,) = Stack(lambda: Block(False, True)), drawn(LENGTH, batch_first=True)
    model.double()
    hidden = padded(LENGTH, ALL_BUT_ONE)
    wanted = model(x, hidden=hidden)
    assert wanted[0].isnan().all()
    torch.testing.assert_close(Compilation(model).model(x, hidden=hidden), wanted, equal_nan=True)
