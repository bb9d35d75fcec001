"""Calls that no rule reads, inside of layers: they are operators of the layers' regions, and gradients are eager's."""

import random
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import Tensor, nn

from autotuner.api.survey import region_calls
from autotuner.ir.models import Model
from autotuner.plan.configuration import Configuration
from tests.runtime.capture.known import Compilation, Known, assert_equal, gradients

WIDTH, LENGTH, LAYERS = 16, 8, 3
Inner = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    """A feed-forward between whose products something is computed, with a scale of its own as in LayerScale."""

    def __init__(self, inner: Sequence[Inner]) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.rand(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        for each in self.inner:
            y = each(y)
        result: Tensor = x + self.scale * self.down(y)
        return result


def interleaved(x: Tensor) -> Tensor:
    angles = torch.arange(LENGTH, dtype=x.dtype)[:, None] / torch.arange(1, WIDTH + 1, dtype=x.dtype)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = torch.stack((-odd, even), -1).flatten(-2)
    result: Tensor = x * angles.cos().repeat_interleave(2, -1) + turned * angles.sin().repeat_interleave(2, -1)
    return result


def partial_rotation(x: Tensor) -> Tensor:
    first, rest = x[..., :8], x[..., 8:]
    half = torch.cat((-first[..., 4:], first[..., :4]), -1)
    return torch.cat((first * 0.3 + half * 0.7, rest), -1)


def windows(x: Tensor) -> Tensor:
    b, length, width = x.shape
    moved = x.roll(2, 1).view(b, length // 4, 4, width).transpose(1, 2)
    return moved.softmax(1).mul(moved).transpose(1, 2).reshape(b, length, width).roll(-2, 1)


def banded(x: Tensor) -> Tensor:
    places = torch.arange(LENGTH)
    seen = (places[:, None] - places).abs() < 3
    return torch.where(seen, 1.0, 0.0).to(x.dtype) @ x


def largest(x: Tensor) -> Tensor:
    values, places = x.max(-1, keepdim=True)
    return torch.where(places > WIDTH, x, x - values)


POINTWISE: dict[str, Inner] = {
    "soft cap": lambda x: torch.tanh(x / 3.0) * 3.0,
    "own GELU": lambda x: x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))),
    "squared": lambda x: torch.relu(x) ** 2,
    "quick GELU": lambda x: x * torch.sigmoid(1.702 * x),
    "softplus": lambda x: nn.functional.softplus(x) + 1.0,
    "leaky": lambda x: nn.functional.leaky_relu(x, 0.2).clamp(-2.0, 2.0),
    "halves": lambda x: torch.cat((x[..., :WIDTH].sigmoid() * x[..., WIDTH:], x[..., WIDTH:]), -1),
}
PROGRAMS: dict[str, Inner] = {
    "interleaved": interleaved,
    "partial rotation": partial_rotation,
    "windows": windows,
    "cumulated": lambda x: x.cumsum(1) / torch.arange(1, LENGTH + 1, dtype=x.dtype)[:, None],
    "padded": lambda x: nn.functional.pad(x, (0, 0, 1, 0))[:, :-1] - x,
    "standardised": lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1.0),
    "banded": banded,
    "largest": largest,
    "sorted": lambda x: x.sort(-1).values,
    "squeezed": lambda x: x * x.mean(1, keepdim=True).sigmoid(),
    "einsum": lambda x: torch.einsum("blh,bmh,bmk->blk", x, x.tanh(), x),
    "stacked": lambda x: torch.stack((x, x.flip(1)), 0).amax(0),
    "normalised": lambda x: nn.functional.normalize(x, dim=-1),
    "unfolded": lambda x: x.unfold(-1, 2, 2).prod(-1).repeat(1, 1, 2),
}


class Finding(Known):
    """Knows every model, and which ones it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Model] = []

    def find(self, models: Iterable[Model], device_type: str) -> list[Configuration | None]:
        self.found += (asked := list(models))
        return super().find(asked, device_type)


def captured(inner: Sequence[Inner], dtype: torch.dtype = torch.float64) -> tuple[list[Model], int]:
    """Compare gradients with eager's, and return the models of the regions that ran, and how many there are."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(inner) for _ in range(LAYERS)), nn.LayerNorm(WIDTH)).to(dtype)
    x, weights = torch.randn(2, 2, LENGTH, WIDTH, dtype=dtype)
    x.requires_grad_()

    def loss(called: Callable[[Tensor], Tensor]) -> Tensor:
        x.grad = None
        found: Tensor = (called(x) * weights).sum()
        return found

    wanted, wanted_x = gradients(model, loss), x.grad
    knowledge = Finding()
    compilation = Compilation(model, knowledge)
    for _ in range(2):
        assert_equal(gradients(model, loss, compilation.model), wanted, 1e-12)
        assert wanted_x is not None
        assert x.grad is not None
        torch.testing.assert_close(x.grad, wanted_x)
    return knowledge.found, sum(graph.tuned_places for graph in compilation.compiled)


def kinds(model: Model) -> list[str]:
    return [operator.kind for operator in model.graph().operators]


@pytest.mark.slow
@pytest.mark.parametrize("name", POINTWISE)
def test_what_acts_element_by_element_is_one_expression(name: str) -> None:
    found, tuned = captured([POINTWISE[name]])
    assert tuned == LAYERS
    for model in found:
        if name == "halves":
            assert kinds(model).count("program") == 1
        else:
            assert "program" not in kinds(model)
            assert kinds(model).count("pointwise") == 2  # and the scale behind the last product


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_anything_else_is_a_program_of_the_region(name: str) -> None:
    found, tuned = captured([PROGRAMS[name]])
    assert tuned == LAYERS
    for model in found:
        assert "program" in kinds(model)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_any_of_them_behind_each_other(seed: int) -> None:
    chosen = random.Random(seed).sample(sorted((POINTWISE | PROGRAMS).items()), 3)
    _, tuned = captured([inner for _, inner in chosen])
    assert tuned == LAYERS


class FirstPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


@pytest.mark.slow
def test_one_place_of_what_40_layers_make_is_found_along_each_tensor_once() -> None:
    """Each layer adds what it reads to what it makes of it: along all ways there would be 2**40 of them."""
    layers = [Layer([nn.functional.gelu]) for _ in range(40)]
    model = nn.Sequential(*layers, FirstPlace(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4))
    found = region_calls(model, [torch.randn(2, LENGTH, WIDTH)])
    assert list(found.runs.values()) == [40]


@pytest.mark.slow
def test_what_draws_random_numbers_stays_torchs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer([lambda x: x + torch.rand_like(x)]) for _ in range(LAYERS)))
    compilation, x = Compilation(model), torch.randn(2, LENGTH, WIDTH)
    torch.manual_seed(1)
    found = compilation.model(x)
    torch.manual_seed(1)
    torch.testing.assert_close(found, model(x))
    (graph,) = compilation.compiled
    assert any("it draws random numbers" in reason for reason in graph.reasons)
