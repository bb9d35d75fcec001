"""z-losses of heads: computed with their cross entropy where only their sum has a gradient; else left as they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runtime.capture.known import Compilation, assert_equal, gradients
from tests.runtime.capture.test_heads import (
    LENGTH,
    ROWS,
    SAID,
    WORDS,
    Head,
    assert_left_alone,
    flat,
    operands,
    said,
    small_heads,
)

__all__ = ["small_heads"]
"""A fixture, of every test."""


def squares(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1).square()


def counted(logits: Tensor, labels: Tensor) -> Tensor:
    """A z-loss: the mean of squares of rows that are not ignored."""
    counts = labels != -100
    return (torch.logsumexp(logits, dim=-1).pow(2) * counts).sum() / counts.sum() * 1e-2


JOINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a mean": lambda logits, labels: flat(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean(),
    "of rows that count": lambda logits, labels: flat(logits, labels) + counted(logits, labels),
    "by tensors": lambda logits, labels: (
        torch.full((), 0.1, dtype=torch.float64) * squares(logits).mean().div(torch.full((), 3.0)).mul(2)
        + flat(logits, labels)
    ),
    "of a cast of its own": lambda logits, labels: (
        flat(logits.contiguous(), labels) + squares(logits.double().view(-1, WORDS).float().double()).mean()
    ),
    "behind a cap, by a sum": lambda logits, labels: (
        flat(
            (capped := 4.0 * torch.tanh(logits / 4.0)).flatten(0, 1).view(ROWS, LENGTH, WORDS), labels, reduction="sum"
        )
        + (capped.logsumexp(dim=2) ** 2).sum() / 50.0
    ),
}


@pytest.mark.parametrize("case", JOINED)
def test_a_z_loss_is_computed_with_the_head(case: str) -> None:
    model, given = Head(JOINED[case]), operands()
    compilation = Compilation(model)
    found = gradients(model, lambda each: each(*given), compilation.model)
    assert said(compilation) == [SAID]
    tolerance = 1e-7 if case == "of a cast of its own" else 1e-12  # to float32
    assert_equal(found, gradients(model, lambda each: each(*given)), tolerance)


def without(function: Callable[[], Tensor], mode: Callable[[], Any] = torch.no_grad) -> Tensor:
    with mode():
        return function()


def added_without_gradients(logits: Tensor, labels: Tensor) -> Tensor:
    loss, z_loss = flat(logits, labels), squares(logits).mean()
    with torch.no_grad():
        loss += z_loss
    return loss


APART: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a z-loss of other rows": lambda logits, labels: flat(logits[:, :-1], labels[:, 1:]) + squares(logits).mean(),
    "a z-loss of other scores": lambda logits, labels: flat(logits * 0.5, labels) + squares(logits).mean(),
    "a z-loss over rows": lambda logits, labels: flat(logits, labels) + logits.logsumexp(1).square().mean(),
    "a z-loss that is no sum": lambda logits, labels: flat(logits, labels) + squares(logits).amax(),
    "log-sum-exps are not squared": lambda logits, labels: flat(logits, labels) + logits.logsumexp(-1).mean(),
    "log-sum-exps are cubed": lambda logits, labels: flat(logits, labels) + (logits.logsumexp(-1) ** 3).mean(),
    "log-sum-exps are read": lambda logits, labels: (
        flat(logits, labels) + ((read := logits.logsumexp(-1)) ** 2).mean(), read
    ),
    "a part of the loss has a gradient": lambda logits, labels: (
        (first := flat(logits, labels)) + squares(logits).mean(), first
    ),
    "a z-loss has a gradient of its own": lambda logits, labels: (
        flat(logits, labels) + (z_loss := squares(logits).mean()), z_loss
    ),
    "its rows have learned factors": lambda logits, labels: flat(logits, labels) + (
        squares(logits) * logits[..., 0].sigmoid()
    ).mean(),
    "unrecorded, a z-loss": lambda logits, labels: flat(logits, labels) + without(lambda: squares(logits).mean()),
    "unrecorded, a z-loss in inference mode": lambda logits, labels: flat(logits, labels) + without(
        lambda: squares(logits).mean(), torch.inference_mode
    ),
    "unrecorded, the other loss": lambda logits, labels: without(lambda: flat(logits, labels)) + squares(logits).mean(),
    "unrecorded, a view for the z-loss": lambda logits, labels: flat(logits, labels) + squares(
        without(lambda: logits.view(-1, WORDS))
    ).mean(),
    "unrecorded, their sum": added_without_gradients,
    "unrecorded, the values that are told": lambda logits, labels: (
        first := flat(logits, labels), second := squares(logits).mean(), told := without(lambda: 2 * first.detach()),
        (first + second, told),
    )[-1],
}  # fmt: skip


@pytest.mark.parametrize("case", APART)
def test_a_head_is_left_alone_where(case: str) -> None:
    assert_left_alone(Head(APART[case]))


@torch.no_grad()
@pytest.mark.parametrize("by", ["a factor", "a divisor"])
def test_a_z_loss_that_the_loss_of_another_head_scales_is_left_alone(by: str) -> None:
    class Two(Head):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            one, other = self.head(x), self.head(2 * x)
            scale = flat(other, labels)
            z_loss = squares(one).mean()
            scaled = z_loss * scale if by == "a factor" else z_loss / scale
            return flat(one, labels) + scaled

    model, given = Two(flat), operands()
    compilation = Compilation(model)
    torch.testing.assert_close(compilation.model(*given), model(*given), rtol=1e-13, atol=0)
    assert said(compilation) == [SAID]


@torch.no_grad()
@pytest.mark.parametrize("order", [1, -1])
def test_without_gradients_a_factor_is_known_from_what_it_scales(order: int) -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        counts, factor = labels != -100, torch.full((), 0.1, dtype=torch.float64)
        rows = torch.mul(*(squares(logits), counts)[::order])
        return torch.mul(*(rows.mean(), factor)[::order]) + flat(logits, labels)

    model, given = Head(loss), operands()
    compilation = Compilation(model)
    torch.testing.assert_close(compilation.model(*given), model(*given), rtol=1e-13, atol=0)
    assert said(compilation) == [SAID]


def test_a_z_loss_inside_of_vmap_is_left_alone() -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        first, second = flat(logits, labels), squares(logits).mean()
        scales = torch.tensor([0.1, 0.2], dtype=logits.dtype)
        each: Tensor = torch.vmap(lambda scale: first + scale * second)(scales)
        return each.sum()

    assert_left_alone(Head(loss))


def test_a_z_loss_of_other_logits_stays_what_it_is() -> None:
    class Routed(Head):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            body = self.body(x)
            return flat(self.head(torch.tanh(body)), labels) + squares(body).mean() / 100

    model, given = Routed(flat), operands()
    compilation = Compilation(model)
    found = gradients(model, lambda each: each(*given), compilation.model)
    assert said(compilation) == [SAID]
    assert_equal(found, gradients(model, lambda each: each(*given)), 1e-12)


@pytest.mark.parametrize("is_before", [False, True])
def test_parts_of_a_loss_with_a_z_loss_may_be_told(is_before: bool) -> None:
    def loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = flat(logits, labels), squares(logits).mean() / 100
        if is_before:
            told = first.detach(), second.detach() * 2
            return first + second, *told
        return first + second, first.detach(), second.detach() * 2

    model, given = Head(loss), operands()
    compilation = Compilation(model)
    found = gradients(model, lambda each: each(*given)[0], compilation.model)
    assert said(compilation) == [SAID]
    assert_equal(found, gradients(model, lambda each: each(*given)[0]), 1e-12)
    for one, other in zip(compilation.model(*given), model(*given), strict=True):
        assert one.requires_grad == other.requires_grad
        torch.testing.assert_close(one, other, rtol=1e-13, atol=0)


@torch.no_grad()
def test_a_z_loss_whose_factors_are_changed_afterwards_is_left_alone() -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        counts = torch.ones_like(labels, dtype=torch.float64)
        second = (squares(logits) * counts).mean()
        counts.zero_()
        return flat(logits, labels) + second

    model, given = Head(loss), operands()
    compilation = Compilation(model)
    torch.testing.assert_close(compilation.model(*given), model(*given), rtol=1e-13, atol=0)
    assert compilation.compiled
    assert not said(compilation)
