"""Models whose attention is inside of windows: their layers are regions, and small enough to be searched."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from autotuner.api.survey import region_calls
from autotuner.ir.autodiff import training_graph
from autotuner.space import build_space, space_file
from tests.runtime.capture.known import Compilation, assert_equal, gradients

SIZES = {"image_size": 64, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "num_labels": 8,
         "drop_path_rate": 0.0}  # fmt: skip


OPTIONS: tuple[dict[str, bool], ...] = ({}, {"adds": True}, {"adds": True, "hides": True})


class Windows(nn.Module):
    """A layer as torchvision's and timm's: norm and attention in windows of 4 x 4 positions, then a feed-forward.

    Where it `adds`, attention is written out, with a learned bias for each pair of positions; where it `hides`, with a
    mask between positions of each of the four windows of an image behind that.
    """

    mask: Tensor | None

    def __init__(
        self, width: int = 32, heads: int = 2, window: int = 4, *, adds: bool = False, hides: bool = False
    ) -> None:
        super().__init__()
        hidden = torch.rand(4, window**2, window**2) < 0.3
        self.register_buffer("mask", -100.0 * (hidden & ~torch.eye(window**2, dtype=torch.bool)) if hides else None)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads)) if adds else None
        self.places = torch.randint(0, (2 * window - 1) ** 2, (window**2, window**2))
        self.heads, self.window = heads, window
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.stacked, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        b, height, breadth, width = x.shape
        of, heads = self.window, self.heads
        x = x.view(b, height // of, of, breadth // of, of, width).permute(0, 1, 3, 2, 4, 5)
        x = x.reshape(-1, of * of, width)
        query, key, value = self.stacked(x).view(len(x), of * of, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        if self.table is None:
            y = nn.functional.scaled_dot_product_attention(query, key, value)
        else:
            scores = query * query.shape[-1] ** -0.5 @ key.transpose(-2, -1)
            scores = scores + self.table[self.places].permute(2, 0, 1)
            if self.mask is not None:
                scores = (scores.unflatten(0, (-1, len(self.mask))) + self.mask[:, None]).flatten(0, 1)
            y = scores.softmax(-1) @ value
        x = y.transpose(1, 2).reshape(x.shape)
        x = self.out(x).view(b, height // of, breadth // of, of, of, width)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(b, height, breadth, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return y


def swin() -> tuple[nn.Module, dict[str, Tensor]]:
    model: Any = transformers.SwinForImageClassification(transformers.SwinConfig(**SIZES))
    return model, {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.tensor([1, 2])}


def windows(**options: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.Sequential(Windows(**options), Windows(**options)), (torch.randn(2, 8, 8, 32),)


@pytest.mark.slow
@pytest.mark.parametrize("make", [swin, windows])
def test_the_search_space_of_each_layer_is_small(make: Callable[[], tuple[nn.Module, Any]]) -> None:
    torch.manual_seed(0)
    model, batch = make()
    found = region_calls(model, [batch]).models.values()
    assert found
    for device_type in ("cpu", "cuda"):
        sizes = [len(build_space(training_graph(each.graph()), space_file(device_type)).choices) for each in found]
        assert max(sizes) < 20_000


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_positions_of_a_window_are_one_axis_so_that_attention_is_one_kernel(options: dict[str, bool]) -> None:
    model, (x,) = windows(**options)
    calls_of_layers = region_calls(model.bfloat16(), [(x.bfloat16().requires_grad_(),)])
    (model_of_layer,) = calls_of_layers.models.values()  # the first layer is like the second
    graph = model_of_layer.graph()
    (softmax,) = (operator for operator in graph.operators if operator.kind == "softmax")
    windows_of = (2, 4) if "hides" in options else (8,)  # of each image, or of all
    assert graph.shape(softmax.outputs[0]) == (*windows_of, 2, 16, 16)  # heads, positions twice
    assert ("mask" in {operator.kind for operator in graph.operators}) == ("hides" in options)
    calls = build_space(training_graph(graph), space_file("cuda")).calls.values()
    assert {"triton_attention", "triton_attention_grad"} <= {call.candidate.kernel for call in calls}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_without_gradients_the_regions_are_the_same(options: dict[str, bool]) -> None:
    model, batch = windows(**options)
    with_gradients = region_calls(model, [batch]).models.keys()
    with torch.no_grad():
        assert region_calls(model, [batch]).models.keys() == with_gradients


class Gate(nn.Module):
    """A layer with a softmax that is no attention's, behind a frozen bias, and a number beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.out = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.gate.bias.requires_grad_(False)
        self.register_buffer("number", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.out((self.gate(self.norm(x)) + self.number).softmax(-1))
        return made


@pytest.mark.slow
def test_a_frozen_bias_of_a_gate_is_no_mask() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Gate(), Gate()).double(), torch.randn(2, 8, 32, dtype=torch.float64)
    found = region_calls(model, [(x,)]).models.values()
    assert not any(operator.kind == "mask" for each in found for operator in each.graph().operators)

    def loss(called: Any) -> Tensor:
        made: Tensor = called(x).square().mean()
        return made

    wanted = gradients(model, loss)
    assert_equal(gradients(model, loss, Compilation(model).model), wanted, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_layers_with_windows_compute_what_eager_does(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    model, (x,) = windows(**options)
    model, x = model.double(), x.double()

    def loss(called: Any) -> Tensor:
        found: Tensor = called(x).square().mean()
        return found

    wanted = gradients(model, loss)
    compilation = Compilation(model)
    for _ in range(2):
        assert_equal(gradients(model, loss, compilation.model), wanted, 1e-12)
    assert sum(graph.tuned_places for graph in compilation.compiled) >= 2
