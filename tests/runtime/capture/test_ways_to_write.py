"""Layers that are written in ways that once left them to torch: each is one region, with eager's gradients."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autotuner.api.survey import region_calls
from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import Model
from tests.runtime.capture.known import Compilation, assert_equal, gradients

WIDTH, HEADS, LENGTH, LAYERS = 32, 4, 12, 3
WIDTHS = range(33, 63)


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], HEADS, -1).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (heads(project(x)) for project in list(self.projections)[:3])
        made = functional.scaled_dot_product_attention(*self.before(query, key), value)
        found: Tensor = self.projections[3](made.transpose(1, 2).flatten(2))
        return found

    def before(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query, key


class Plain(nn.Module):
    """A layer with norms before its attention and its feed-forward."""

    def __init__(self, attention: Callable[[], nn.Module] = Attention) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = attention()
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        found: Tensor = x + self.feed_forward(self.norms[1](x))
        return found


class ScaledByATensor(Attention):
    """As DeBERTa has it: the root of a tensor that is made of a number."""

    def before(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.sqrt(torch.tensor(query.size(-1), dtype=torch.float) * 3)
        return query, key / scale.to(key.dtype)


class NormedTwice(nn.Module):
    """As nanochat begins: what a norm without a scale makes goes into another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Plain()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        found: Tensor = self.layer(x)
        return found


class OnePlace(nn.Module):
    """As recurrences are unrolled: one place of a dimension is read, which is cut into chunks then."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.in_chunks = Plain(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found = self.in_chunks(x)
        place = found[..., 11, None].sin()
        chunks = found.unflatten(2, (4, 8)).softmax(3).flatten(2, 3)
        result: Tensor = self.layer(x) + chunks * place
        return result


class Chosen(nn.Module):
    """As experts are chosen by scores with a bias that only the choice depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.router = Plain(), nn.Linear(WIDTH, 4)
        self.bias = nn.Parameter(torch.tensor([0.1, -0.2, 0.3, 0.0]), requires_grad=False)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        scores = self.router(x).sigmoid()
        places = torch.topk(scores + self.bias, 2).indices
        weights = torch.zeros_like(scores).scatter(-1, places, scores.gather(-1, places))
        return x + torch.einsum("blh,ehf,ble->blf", x, self.experts, weights)


class Mapped(nn.Module):
    """As selective scans are written: a part of the layer runs inside of vmap, and stays torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Plain()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        sums: Tensor = torch.vmap(lambda row: row.cumsum(0).sin())(x)
        return x + sums


class ManyWidths(nn.Module):
    """More axes than letters of one case: a feed-forward through thirty widths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Plain()
        widths = [WIDTH, *WIDTHS, WIDTH]
        self.through = nn.Sequential(
            *(part for one, other in pairwise(widths) for part in (nn.Linear(one, other), nn.SiLU()))
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) + self.through(x)
        return found


class Stack(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Joint(nn.Module):
    """A layer of an image and a text, as Stable Diffusion 3 has them: weights of their own, one attention for both.

    Both are scaled and shifted by what a condition of all layers gives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.projections, self.results, self.inner = (
            nn.ModuleList(made() for _ in range(2))
            for made in (
                lambda: nn.Linear(WIDTH, 3 * WIDTH),
                lambda: nn.Linear(WIDTH, WIDTH),
                lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(approximate="tanh"), nn.Linear(64, WIDTH)),
            )
        )
        self.conditions = nn.ModuleList(nn.Linear(WIDTH, 6 * WIDTH) for _ in range(2))

    def forward(self, image: Tensor, text: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        shifts = [made(functional.silu(condition))[:, None].chunk(6, -1) for made in self.conditions]
        streams = [image, text]
        read = []
        for x, project, (scale, shift, *_) in zip(streams, self.projections, shifts, strict=True):
            normed = functional.layer_norm(x, (WIDTH,)) * (1 + scale) + shift
            read.append([heads(part) for part in project(normed).chunk(3, -1)])
        query, key, value = (torch.cat(parts, 2) for parts in zip(*read, strict=True))
        made = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        for place, part in enumerate(torch.split(made, [each.shape[1] for each in streams], 1)):
            _, _, gate, scale, shift, last = shifts[place]
            x = streams[place] + gate * self.results[place](part)
            normed = functional.layer_norm(x, (WIDTH,)) * (1 + scale) + shift
            streams[place] = x + last * self.inner[place](normed)
        return streams[0], streams[1]


class OfTwoStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Joint() for _ in range(LAYERS))

    def forward(self, image: Tensor) -> Tensor:
        text, condition = image[:, :5].sin(), image[:, 0].cos()
        for layer in self.layers:
            image, text = layer(image, text, condition)
        return torch.cat([image, text], 1)


class Recurrent(nn.Module):
    """As Bamba and Qwen3-Next write recurrences: a mask and a state are made in the midst of a layer, behind what the
    cache keeps of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.inner = Plain(), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layer(x)
        query, key, value = self.inner(x).chunk(3, -1)
        kept = key.cummax(1).values
        earlier = torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool))
        weights = (query @ key.transpose(1, 2)).masked_fill(~earlier, 0)
        state = torch.zeros(2, WIDTH, WIDTH, dtype=x.dtype)
        return x + weights @ value + query @ (state + 1), kept


class ShownBias(Attention):
    """As transformers puts a relative bias and a mask together, beside its own attention written out."""

    def forward(self, x: Tensor, bias: Tensor, shown: Tensor) -> Tensor:  # type: ignore[override]
        query, key, value = (heads(project(x)) for project in list(self.projections)[:3])
        scores = query @ key.transpose(2, 3) + torch.where(shown, bias, torch.finfo(x.dtype).min)
        found: Tensor = self.projections[3]((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        return found


class OfShownBiases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"attention": ShownBias(), "norm": nn.LayerNorm(WIDTH)}) for _ in range(LAYERS)
        )
        self.table = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        bias, shown = self.table.sin()[None], (x.mean(-1) > -0.1)[:, None, None]
        for layer in self.layers:
            x = x + layer["attention"](layer["norm"](x), bias, shown)  # type: ignore[index]
        return x


class OfStates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Recurrent() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        states = []
        for layer in self.layers:
            x, state = layer(x)
            states.append(state)
        return x + torch.stack(states).sum(0)


class SummedBeside(nn.Module):
    """As a mixer without a class for its layers: sums are written in the model, between modules of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "norm_1": nn.LayerNorm(WIDTH),
                "tokens": nn.Sequential(nn.Linear(LENGTH, 32), nn.GELU(), nn.Linear(32, LENGTH)),
                "norm_2": nn.LayerNorm(WIDTH),
                "attention": Attention(),
            })
            for _ in range(LAYERS)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["tokens"](layer["norm_1"](x).transpose(1, 2)).transpose(1, 2)  # type: ignore[index]
            x = x + layer["attention"](layer["norm_2"](x))  # type: ignore[index]
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a scale that is a tensor": lambda: Stack(lambda: Plain(ScaledByATensor)),
    "norms of norms": lambda: Stack(NormedTwice),
    "one place of what is cut": lambda: Stack(OnePlace),
    "a bias of a choice": lambda: Stack(Chosen),
    "a part inside of vmap": lambda: Stack(Mapped),
    "many widths": lambda: Stack(ManyWidths),
    "two streams": OfTwoStreams,
    "constants in the midst": OfStates,
    "sums beside modules": SummedBeside,
    "a bias where a mask shows": OfShownBiases,
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def x() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def found_in(model: nn.Module) -> list[tuple[Model, int]]:
    found = region_calls(model, [(x(),)])
    return [(region, found.runs[key]) for key, region in found.models.items()]


@pytest.mark.parametrize("name", MODELS)
def test_each_layer_is_one_region_with_the_gradients_of_eager(name: str) -> None:
    model = made(name)
    found = found_in(model)
    assert sum(runs for _, runs in found) == LAYERS
    assert all([each.kind for each in region.graph().operators].count("softmax") >= 1 for region, _ in found)
    for region, _ in found:
        training_graph(region.graph())  # as tuning makes it

    def loss(called: Any) -> Tensor:
        y: Tensor = called(x())
        return y.sin().mean() + y.square().mean()

    wanted = gradients(model, loss)
    compilation = Compilation(model)
    assert_equal(gradients(model, loss, compilation.model), wanted, 1e-12)
    assert sum(graph.tuned_places for graph in compilation.compiled) == LAYERS


def test_what_only_a_choice_depends_on_is_no_parameter_of_the_region() -> None:
    ((region, _),) = found_in(made("a bias of a choice"))
    tensors = region.graph().tensors
    (bias,) = (each.inputs[1] for each in region.graph().operators if each.kind == "pointwise" and len(each.inputs) > 1)
    assert tensors[bias].role == "input"


def test_a_choice_between_a_bias_and_the_lowest_number_is_never_made() -> None:
    ((region, _),) = found_in(made("a bias where a mask shows"))
    graph = region.graph()
    axes = {
        kind: [[graph.tensors[name].axes for name in each.inputs] for each in graph.operators if each.kind == kind]
        for kind in ("bias", "mask")
    }
    ((scores, mask),) = axes["mask"]
    of_heads = [added for biased, added in axes["bias"] if biased == scores]
    assert (len(scores), mask) == (4, scores[0] + scores[3])
    assert [sorted(added) for added in of_heads] == [sorted(scores[1:])]


def test_axes_behind_the_26th_have_capital_letters() -> None:
    ((region, _),) = found_in(made("many widths"))
    capitals = {letter: extent for letter, extent in region.extents.items() if letter.isupper()}
    assert len(region.extents) > 26
    assert set(capitals.values()) <= set(WIDTHS)


def test_a_scale_on_the_host_is_one_for_tensors_of_another_device_too() -> None:
    """`torch.tensor(3.0)` lies on the CPU, wherever the model does."""
    found = region_calls(made("a scale that is a tensor").to("meta"), [(x().to("meta"),)])
    ((key, region),) = found.models.items()
    assert found.runs[key] == LAYERS
    assert [each.kind for each in region.graph().operators].count("scale") == 2
