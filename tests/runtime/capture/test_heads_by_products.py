"""Heads that are a product with a matrix, and heads whose bias is added behind: one operator with their loss."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from autotuner.runtime import linear_cross_entropy as operator
from autotuner.runtime.capture import heads
from tests.runtime.capture.known import Compilation, assert_equal, gradients

WORDS, HIDDEN, ROWS, LENGTH = 60, 32, 2, 12
Logits = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "LOGITS_MIN", 1)
    monkeypatch.setattr(heads, "GRADIENTS", 0)
    monkeypatch.setattr(operator, "rows_of_chunk", lambda rows, _: -(-rows // 2))


class Head(nn.Module):
    """A head whose logits a function makes of x, its weight and its bias, behind something to train."""

    def __init__(self, logits: Logits, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(HIDDEN, HIDDEN, dtype=dtype)
        self.weight = nn.Parameter(torch.randn(WORDS, HIDDEN, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(WORDS, dtype=dtype))
        self.logits = logits

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(torch.tanh(self.body(x)), self.weight, self.bias)
        return cross_entropy(logits.flatten(0, -2), labels.flatten())


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    labels[:, ::4] = -100
    return torch.randn(ROWS, LENGTH, HIDDEN, generator=generator, dtype=torch.float64).to(dtype), labels


def said(compilation: Compilation) -> list[str]:
    return [sentence for graph in compilation.compiled for sentence in graph.heads]


JOINED: dict[str, Logits] = {
    "a bias is added": lambda x, weight, bias: linear(x, weight) + bias,
    "to a bias": lambda x, weight, bias: bias + linear(x, weight),
    "a bias of one row": lambda x, weight, bias: torch.add(linear(x, weight), bias[None]),
    "a bias that is computed": lambda x, weight, bias: linear(x, weight) + bias.exp().view(1, 1, WORDS),
    "in place": lambda x, weight, bias: linear(x, weight).add_(bias),
    "behind views, in front of a cap": lambda x, weight, bias: (
        3.0 * torch.tanh((linear(x, weight)[:, :].reshape(-1, WORDS) + bias) / 3.0)
    ),
    "turned by t": lambda x, weight, bias: torch.matmul(x, weight.t()) + bias,
    "turned by T": lambda x, weight, _: x @ weight.T,
    "turned by mT": lambda x, weight, _: x @ weight.mT * 0.5,
    "turned by transpose": lambda x, weight, _: x.matmul(weight.transpose(-1, 0)),
    "rows by mm": lambda x, weight, _: x.flatten(0, 1).mm(weight.t()),
    "features first": lambda x, weight, _: x @ weight.view(HIDDEN, WORDS),
    "features first, of two parts": lambda x, weight, bias: x @ torch.cat([weight.t()[:20], weight.t()[20:]]) + bias,
}


@pytest.mark.parametrize("case", JOINED)
def test_a_head_is_joined_with_its_loss_where_its_product_or_its_bias_is(case: str) -> None:
    model, given = Head(JOINED[case]), operands()
    compilation = Compilation(model)
    found = gradients(model, lambda each: each(*given), compilation.model)
    assert len(said(compilation)) == 1
    assert_equal(found, gradients(model, lambda each: each(*given)), 1e-12)


APART: dict[str, Logits] = {
    "a factor is of the product alone": lambda x, weight, bias: linear(x, weight) * 2.0 + bias,
    "a cap is of the product alone": lambda x, weight, bias: torch.tanh(linear(x, weight)) + bias,
    "a second bias is added": lambda x, weight, bias: linear(x, weight, bias) + bias,
    "two are added": lambda x, weight, bias: linear(x, weight) + bias + bias.exp(),
    "a number of each row is added": lambda x, weight, _: linear(x, weight) + x[..., :1],
    "a number is added": lambda x, weight, _: linear(x, weight) + 1.0,
    "logits are added": lambda x, weight, _: linear(x, weight) + linear(x.exp(), weight),
    "a bias is added times a number": lambda x, weight, bias: torch.add(linear(x, weight), bias, alpha=2),
    "each row of a batch has its matrix": lambda x, weight, _: x @ weight.t().expand(ROWS, HIDDEN, WORDS),
}


@pytest.mark.parametrize("case", APART)
def test_a_head_is_left_alone_where(case: str) -> None:
    model, given = Head(APART[case]), operands()
    compilation = Compilation(model)
    found = gradients(model, lambda each: each(*given), compilation.model)
    assert not said(compilation)
    assert_equal(found, gradients(model, lambda each: each(*given)), 1e-12)


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("body",), ("weight", "body"), ("bias", "body")])
def test_what_is_frozen_gets_no_gradient(frozen: tuple[str, ...]) -> None:
    model, given = Head(JOINED["turned by t"]), operands()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    compilation = Compilation(model)
    found = gradients(model, lambda each: each(*given), compilation.model)
    assert len(said(compilation)) == 1
    assert not [name for name in found if name.startswith(frozen)]
    assert_equal(found, gradients(model, lambda each: each(*given)), 1e-12)


def test_a_bias_behind_a_product_without_gradients_gets_its_own() -> None:
    def logits(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.no_grad():
            made = linear(x, weight)
        return made + bias

    model, given = Head(logits), operands()
    compilation = Compilation(model)
    found = gradients(model, lambda each: each(*given), compilation.model)
    assert len(said(compilation)) == 1
    assert found.keys() == {"bias", "loss"}
    assert_equal(found, gradients(model, lambda each: each(*given)), 1e-12)


def test_a_head_without_gradients_behind_what_is_trained_has_none() -> None:
    def logits(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.no_grad():
            return x @ weight.t() + bias

    compilation = Compilation(Head(logits))
    assert not compilation.model(*operands()).requires_grad
    assert len(said(compilation)) == 1


@pytest.mark.parametrize("case", ["a bias of one row", "turned by t"])
def test_under_autocast_a_bias_in_float32_is_rounded_as_that_of_a_linear_layer(case: str) -> None:
    model, given = Head(JOINED[case], torch.float32), operands(torch.float32)

    def loss(each: Callable[..., Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return each(*given)

    compilation = Compilation(model)
    found = gradients(model, loss, compilation.model)
    assert len(said(compilation)) == 1
    assert_equal(found, gradients(model, loss), 6e-3)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a bias is added", "in place", "turned by t", "features first"])
def test_inductor_compiles_what_is_around_such_a_head(case: str) -> None:
    model, given = Head(JOINED[case]), operands()
    compilation = Compilation(model, compiler="inductor")
    found = gradients(model, lambda each: each(*given), compilation.model)
    assert len(said(compilation)) == 1
    assert_equal(found, gradients(model, lambda each: each(*given)), 1e-12)
