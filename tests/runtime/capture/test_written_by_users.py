"""Blocks as people write them in their own code: whole layers, and the gradients of eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autotuner.api.survey import region_calls
from autotuner.ir.models import Model
from tests.runtime.capture.known import Compilation, assert_equal, gradients

LAYERS, BATCH, LENGTH, WIDTH, HEADS = 3, 2, 6, 16, 2


class Norm(nn.Module):
    """A layer norm with a weight and no bias, which torch's own class had not for long."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)


class CausalBlock(nn.Module):
    """A decoder's layer without any bias: query, key and value of one product, split."""

    def __init__(self, norm: Callable[[], nn.Module], dropout: float) -> None:
        super().__init__()
        self.before, self.behind, self.p = norm(), norm(), dropout
        self.stacked = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.drops = nn.ModuleList(nn.Dropout(dropout) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.stacked(self.before(x)).split(width, dim=2)
        q, k, v = (part.view(rows, length, HEADS, width // HEADS).transpose(1, 2) for part in parts)
        dropout = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(rows, length, width)
        x = x + self.drops[0](self.out(y))
        result: Tensor = x + self.drops[1](self.down(F.gelu(self.up(self.behind(x)))))
        return result


class ImageBlock(nn.Module):
    """An image transformer's layer: query, key and value of one product, taken apart."""

    def __init__(self, apart: Callable[[Tensor], Any], affine: bool = True) -> None:
        super().__init__()
        self.before, self.behind = (nn.LayerNorm(WIDTH, eps=1e-6, elementwise_affine=affine) for _ in range(2))
        self.stacked, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.apart = apart

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        stacked = self.stacked(self.before(x)).reshape(rows, length, 3, HEADS, width // HEADS)
        q, k, v = self.apart(stacked.permute(2, 0, 3, 1, 4))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, width)
        x = x + self.out(y)
        result: Tensor = x + self.mlp(self.behind(x))
        return result


APART: dict[str, Callable[[Tensor], Any]] = {
    "unbind": lambda qkv: qkv.unbind(0),
    "index": lambda qkv: (qkv[0], qkv[1], qkv[2]),
    "select": lambda qkv: [qkv.select(0, place) for place in range(3)],
    "chunk": lambda qkv: [part.squeeze(0) for part in qkv.chunk(3, 0)],
    "split": lambda qkv: [part[0] for part in torch.split(qkv, 1)],
}
NORMS: dict[str, Callable[[], nn.Module]] = {
    "no bias": lambda: Norm(WIDTH),
    "no scale, no bias": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "RMS": lambda: nn.RMSNorm(WIDTH, eps=1e-6),
    "RMS without epsilon": lambda: nn.RMSNorm(WIDTH),
    "RMS without scale": lambda: nn.RMSNorm(WIDTH, elementwise_affine=False),
}


def model_of(block: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(LAYERS)))


def only_region(model: nn.Module) -> Model:
    calls = region_calls(model, [torch.randn(BATCH, LENGTH, WIDTH)])
    ((key, region),) = calls.models.items()
    assert calls.runs[key] == LAYERS
    return region


def kinds(region: Model) -> list[str]:
    return [operator.kind for operator in region.graph().operators]


def check_equal(model: nn.Module) -> None:
    """Check loss and all gradients against eager in float64, and that every layer runs as one region."""
    model = model.double()
    x, weights = torch.randn(2, BATCH, LENGTH, WIDTH, dtype=torch.float64)

    def loss(called: Any) -> Tensor:
        found: Tensor = (called(x) * weights).sum()
        return found

    wanted = gradients(model, loss)
    compilation = Compilation(model)
    for _ in range(2):
        assert_equal(gradients(model, loss, compilation.model), wanted, 1e-12)
    assert [region.calls for region in compilation.regions] == [2] * LAYERS


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_a_causal_block_without_biases_is_whole(norm: str) -> None:
    model = model_of(lambda: CausalBlock(NORMS[norm], 0.0))
    found = kinds(only_region(model))
    kind = "rms_norm" if norm.startswith("RMS") else "layer_norm"
    assert (found.count("softmax"), found.count(kind), found.count("contraction"), found.count("add")) == (1, 2, 8, 2)
    check_equal(model)


@pytest.mark.slow
def test_a_causal_block_with_dropout_is_whole_and_draws_its_masks() -> None:
    model = model_of(lambda: CausalBlock(NORMS["no bias"], 0.1))
    found = kinds(only_region(model))
    assert (found.count("dropout"), found.count("contraction"), found.count("layer_norm")) == (3, 8, 2)
    compilation = Compilation(model)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    first, second = (compilation.model(x) for _ in range(2))
    assert [region.calls for region in compilation.regions] == [2] * LAYERS
    assert not torch.equal(first, second)
    model.eval()
    torch.testing.assert_close(compilation.model(x), model(x))


@pytest.mark.slow
@pytest.mark.parametrize("apart", APART)
def test_an_image_block_is_whole_however_it_takes_query_key_and_value_apart(apart: str) -> None:
    model = model_of(lambda: ImageBlock(APART[apart]))
    found = kinds(only_region(model))
    assert (found.count("softmax"), found.count("contraction"), found.count("layer_norm")) == (1, 8, 2)
    check_equal(model)


@pytest.mark.slow
def test_an_image_block_without_scale_and_bias_is_whole() -> None:
    check_equal(model_of(lambda: ImageBlock(APART["unbind"], affine=False)))


class Regrouping(nn.Module):
    """Views that cut across each other."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.view(8, 6, WIDTH) * 2.0).view(12, 4, WIDTH).tanh().view(BATCH, 24, WIDTH)


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_views_that_cut_across_each_other_leave_the_layers_tuned(first: bool) -> None:
    blocks = model_of(lambda: CausalBlock(NORMS["no bias"], 0.0))
    model = nn.Sequential(Regrouping(), blocks) if first else nn.Sequential(blocks, Regrouping())
    x = torch.randn(BATCH, 24, WIDTH)
    compilation = Compilation(model)
    torch.testing.assert_close(compilation.model(x), model(x))
    assert [region.calls for region in compilation.regions] == [1] * LAYERS


class Patches(nn.Module):
    """Layers between an image's patches and its pixels: their positions are rows and columns before and behind."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.patches, self.blocks, self.pixels = nn.Conv2d(1, WIDTH, 2, 2), blocks, nn.Linear(WIDTH, 4)
        self.places = nn.Parameter(torch.randn(1, 12, WIDTH))

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2) + self.places
        pixels: Tensor = self.pixels(self.blocks(x)).view(-1, 3, 4, 2, 2)
        return pixels.permute(0, 1, 3, 2, 4).reshape(-1, 1, 6, 8)


@pytest.mark.slow
def test_layers_between_patches_and_pixels_are_whole() -> None:
    model = Patches(model_of(lambda: ImageBlock(APART["unbind"], affine=False))).double()
    image, weights = torch.randn(2, BATCH, 1, 6, 8, dtype=torch.float64)

    def loss(called: Any) -> Tensor:
        found: Tensor = (called(image) * weights).sum()
        return found

    wanted = gradients(model, loss)
    compilation = Compilation(model)
    assert_equal(gradients(model, loss, compilation.model), wanted, 1e-12)
    assert [region.calls for region in compilation.regions] == [1] * LAYERS


class Frames(nn.Module):
    """Layers behind convolutions over time, which leave the features of a place far from each other."""

    def __init__(self, turn: Callable[[Tensor], Tensor], *, with_places: bool, with_gelu: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(3, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.blocks = model_of(lambda: ImageBlock(APART["unbind"]))
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH)) if with_places else None
        self.turn, self.with_gelu = turn, with_gelu

    def forward(self, sound: Tensor) -> Tensor:
        x = self.second(F.gelu(self.first(sound)))
        x = self.turn(F.gelu(x) if self.with_gelu else x)
        found: Tensor = self.blocks(x if self.places is None else x + self.places)
        return found


TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "permute": lambda x: x.permute(0, 2, 1),
    "transpose": lambda x: x.transpose(1, 2),
    "mT": lambda x: x.mT,
}


@pytest.mark.slow
@pytest.mark.parametrize(("with_places", "with_gelu"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("turn", TURNS)
def test_layers_behind_turned_convolutions_are_read_as_others_with_their_features_side_by_side(
    turn: str, with_places: bool, with_gelu: bool
) -> None:
    torch.manual_seed(0)
    model = Frames(TURNS[turn], with_places=with_places, with_gelu=with_gelu).double()
    sound, weights = torch.randn(BATCH, 3, LENGTH).double(), torch.randn(BATCH, LENGTH, WIDTH).double()
    calls = region_calls(model, [sound])
    ((key, region),) = calls.models.items()
    assert calls.runs[key] == LAYERS
    assert (kinds(region).count("add"), kinds(region).count("program")) == (2, 0)
    graph = region.graph()
    assert graph.shape("x") == graph.shape(graph.outputs[0]) == (BATCH, LENGTH, WIDTH)

    def loss(called: Any) -> Tensor:
        found: Tensor = (called(sound) * weights).sum()
        return found

    wanted = gradients(model, loss)
    compilation = Compilation(model)
    assert_equal(gradients(model, loss, compilation.model), wanted, 1e-12)
    assert [region.calls for region in compilation.regions] == [1] * LAYERS
