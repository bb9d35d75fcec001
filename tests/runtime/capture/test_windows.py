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


class Windows(nn.Module):
    """A layer as torchvision's and timm's: norm and attention in windows of 4 x 4 positions, then a feed-forward.

    Where it `adds`, attention is written out, with a learned bias for each pair of positions.
    """

    def __init__(self, width: int = 32, heads: int = 2, window: int = 4, *, adds: bool = False) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(window**2, window**2, heads)) if adds else None
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
        if self.bias is None:
            y = nn.functional.scaled_dot_product_attention(query, key, value)
        else:
            scores = query * query.shape[-1] ** -0.5 @ key.transpose(-2, -1) + self.bias.permute(2, 0, 1)
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


def windows(*, adds: bool = False) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.Sequential(Windows(adds=adds), Windows(adds=adds)), (torch.randn(2, 8, 8, 32),)


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
@pytest.mark.parametrize("adds", [False, True])
def test_positions_of_a_window_are_one_axis_so_that_attention_is_one_kernel(adds: bool) -> None:
    model, (x,) = windows(adds=adds)
    calls_of_layers = region_calls(model.bfloat16(), [(x.bfloat16().requires_grad_(),)])
    (model_of_layer,) = calls_of_layers.models.values()  # the first layer is like the second
    graph = model_of_layer.graph()
    (softmax,) = (operator for operator in graph.operators if operator.kind == "softmax")
    assert graph.shape(softmax.outputs[0]) == (8, 2, 16, 16)  # windows, heads, positions twice
    calls = build_space(training_graph(graph), space_file("cuda")).calls.values()
    assert {"triton_attention", "triton_attention_grad"} <= {call.candidate.kernel for call in calls}


@pytest.mark.slow
@pytest.mark.parametrize("adds", [False, True])
def test_layers_with_windows_compute_what_eager_does(adds: bool) -> None:
    torch.manual_seed(0)
    model, (x,) = windows(adds=adds)
    model, x = model.double(), x.double()

    def loss(called: Any) -> Tensor:
        found: Tensor = called(x).square().mean()
        return found

    wanted = gradients(model, loss)
    compilation = Compilation(model)
    for _ in range(2):
        assert_equal(gradients(model, loss, compilation.model), wanted, 1e-12)
    assert sum(graph.tuned_places for graph in compilation.compiled) >= 2
