"""Models that look like what is known and are not: they compute what torch computes, tuned or not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, library, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.runtime.capture.known import Compilation, assert_equal, gradients

HIDDEN, LENGTH, HEADS = 16, 6, 2


class Attention(nn.Module):
    """Attention between three projections of what a function makes of the input, with a mask."""

    def __init__(self, inside: Callable[[nn.Module, Tensor], Tensor], mask: Callable[[], Tensor | None]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.inside, self.mask = inside, mask
        self.weight = nn.Parameter(torch.randn(3, HIDDEN, HIDDEN) / 4)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inside(self, x)
        heads = [
            functional.linear(y, weight).view(*x.shape[:2], HEADS, -1).transpose(1, 2)
            for weight in self.weight.unbind()
        ]
        context = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=self.mask())
        found: Tensor = x + self.out(context.transpose(1, 2).flatten(2))
        return found


def no_mask() -> None:
    return None


def hiding(*shape: int) -> Tensor:
    """Return a mask with rows of its own for queries, of which one sees nothing, and one sees everything."""
    mask = torch.rand(*shape, LENGTH, LENGTH) > 0.5
    mask[..., 2, :], mask[..., 3, :] = False, True
    return mask


def infinite(*shape: int) -> Tensor:
    return torch.zeros(*shape, LENGTH, LENGTH).masked_fill(~hiding(*shape), -torch.inf)


def lowest(*shape: int) -> Tensor:
    """Return a mask whose hidden rows are means of all values, since its numbers are finite."""
    return torch.zeros(*shape, LENGTH, LENGTH).masked_fill(~hiding(*shape), torch.finfo(torch.float32).min)


def prefix_mask() -> Tensor:
    """Return a mask that begins as a causal one, and is changed."""
    mask = torch.ones(LENGTH, LENGTH).tril()
    mask[:, :2] = 1
    return mask.bool()


def causal_mask() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def open_mask() -> Tensor:
    """Return a mask that follows from positions and hides nothing, as models build where nothing is padded."""
    return (torch.arange(LENGTH)[:, None] >= 0).expand(2, 1, LENGTH, LENGTH)


def nearly_open_mask() -> Tensor:
    return torch.arange(LENGTH)[:, None].add(torch.arange(LENGTH)).lt(2 * LENGTH - 2).expand(2, 1, LENGTH, LENGTH)


def norm(layer: Any, x: Tensor) -> Tensor:
    found: Tensor = layer.norm(x)
    return found


def halves_of_norm(layer: Any, x: Tensor) -> Tensor:
    first, second = layer.norm(x).chunk(2, -1)
    return torch.cat([second, first * 2.0], -1)


def rows_by_strides(layer: Any, x: Tensor) -> Tensor:
    y = layer.out(x).transpose(0, 1).contiguous()
    found: Tensor = norm(layer, y.as_strided((x.shape[0], LENGTH, HIDDEN), (LENGTH * HIDDEN, HIDDEN, 1)))
    return found


def by_a_vector(layer: Any, x: Tensor) -> Tensor:
    found: Tensor = norm(layer, x) * (layer.norm.weight @ layer.norm.weight)
    return found


def without_gradients(layer: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = layer.out(norm(layer, x.detach()))
    found: Tensor = norm(layer, x) + y.clone()
    return found


def rounded(layer: Any, x: Tensor) -> Tensor:
    y = x.to(torch.bfloat16).to(torch.float32)
    return norm(layer, x) * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)


def in_place(layer: Any, x: Tensor) -> Tensor:
    y = norm(layer, x) * 1.0
    y += x
    return functional.relu(y, inplace=True)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [halves_of_norm, rows_by_strides, by_a_vector, without_gradients, rounded, in_place])
def test_a_layer_that_is_nearly_known_computes_what_it_computes(inside: Callable[[Any, Tensor], Tensor]) -> None:
    check(inside, no_mask, torch.float64 if inside is by_a_vector else torch.float32)  # its softmax is a hard one


def kinds(compilation: Compilation) -> set[str]:
    return {o.kind for each in compilation.regions for o in each.plan.configuration.model.graph().operators}


@pytest.mark.parametrize(("mask", "causal"), [(causal_mask, True), (prefix_mask, False)])
def test_a_mask_is_causal_only_if_nothing_changes_it(mask: Callable[[], Tensor], causal: bool) -> None:
    compilation = check(norm, mask)
    assert compilation.regions
    assert ("causal_mask" in kinds(compilation)) == causal


@pytest.mark.parametrize(("mask", "is_open"), [(open_mask, True), (nearly_open_mask, False)])
def test_a_mask_is_left_out_only_if_it_hides_nothing(mask: Callable[[], Tensor], is_open: bool) -> None:
    found = kinds(check(norm, mask))
    assert "softmax" in found
    assert ("mask" not in found) == is_open


@pytest.mark.parametrize("shape", [(2, 1), (1, HEADS), ()])
@pytest.mark.parametrize("make", [hiding, infinite, lowest])
def test_a_query_that_sees_nothing_gets_what_torch_gives_it(make: Callable[..., Tensor], shape: tuple[int]) -> None:
    torch.manual_seed(1)
    mask = make(*shape)
    with sdpa_kernel(SDPBackend.MATH):  # flash attention of torch for CPUs has other gradients of the lowest numbers
        assert {"mask", "row_mask", "softmax"} <= kinds(check(norm, lambda: mask))


@pytest.mark.parametrize(
    "view",
    [
        lambda mask: mask[:, None].expand(-1, HEADS, -1, -1),
        lambda mask: mask.unflatten(0, (2, 1)),
        lambda mask: mask.transpose(-2, -1)[:, None],
        lambda mask: mask[:, None, :, :1].expand(-1, -1, -1, LENGTH),
        lambda mask: torch.stack([mask, mask.flip(-1)])[1][:, None],
        lambda mask: mask.flatten(1).view(2, 1, LENGTH, LENGTH),
    ],
    ids=["expanded", "split", "transposed", "of queries alone", "selected", "flattened"],
)
@pytest.mark.parametrize("make", [hiding, infinite])
def test_a_mask_is_read_as_the_view_of_it_that_attention_gets(
    make: Callable[..., Tensor], view: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(1)
    mask = make(2)
    check(norm, lambda: view(mask))


@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 1, 1), (), (2, HEADS, 1)], ids=str)
@pytest.mark.parametrize("lowest", [None, -torch.inf, torch.finfo(torch.float32).min])
def test_a_sequence_that_is_all_padding_gets_what_torch_gives_it(shape: tuple[int, ...], lowest: float | None) -> None:
    keeps = (torch.arange(LENGTH) < 3).repeat(*shape, 1).view(*shape, LENGTH)
    keeps.view(-1, LENGTH)[0] = False
    mask = keeps if lowest is None else torch.zeros(keeps.shape).masked_fill(~keeps, lowest)
    with sdpa_kernel(SDPBackend.MATH):
        assert {"mask", "row_mask", "softmax"} <= kinds(check(norm, lambda: mask))


@library.custom_op("autotuner_tests::doubled", mutates_args={"x"})
def doubled(x: Tensor) -> None:
    x.mul_(2)


def changed_by_an_operator(layer: Any, x: Tensor) -> Tensor:
    shift = torch.ones_like(x[0])
    torch.ops.autotuner_tests.doubled(shift)
    found: Tensor = layer.norm(x) + shift
    return found


def test_what_an_operator_of_the_user_writes_to_is_no_constant() -> None:
    check(changed_by_an_operator, no_mask)


class OfItself(nn.Module):
    """Attention of a projection with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)
        found: Tensor = x + functional.scaled_dot_product_attention(y, y, y)
        return found


class Twice(nn.Module):
    """One layer, called twice: the gradients of its weights are sums."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 32, batch_first=True, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) + self.layer(x * 2)
        return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "regions"), [(lambda: nn.Sequential(OfItself(), OfItself()), 2), (Twice, 2)], ids=["of itself", "twice"]
)
def test_what_is_read_twice_gets_the_sum_of_its_gradients(make: Callable[[], nn.Module], regions: int) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(2, LENGTH, HIDDEN)

    def loss(called: Any) -> Tensor:
        found: Tensor = called(x).square().sum()
        return found

    compilation = Compilation(model)
    assert_equal(gradients(model, loss, compilation.model), gradients(model, loss), 1e-5)
    assert len(compilation.regions) == regions


class OneKeyOrValue(nn.Module):
    """Attention whose heads share one key and have values of their own, or the other way round."""

    def __init__(self, *, shares_key: bool) -> None:
        super().__init__()
        self.shares_key, self.norm = shares_key, nn.LayerNorm(HIDDEN // HEADS)
        self.query, self.own, self.shared, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, own, shared = (
            each(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for each in (self.query, self.own, self.shared)
        )
        own, shared = (each[:, :1].expand(-1, HEADS, -1, -1) for each in (own, shared))
        own = self.norm(own)  # which makes one for each head
        key, value = (shared, own) if self.shares_key else (own, shared)
        context = (query @ key.transpose(-1, -2) * 0.5).softmax(-1) @ value
        found: Tensor = x + self.out(context.transpose(1, 2).flatten(2))
        return found


@pytest.mark.slow
@pytest.mark.parametrize("shares_key", [True, False])
def test_heads_that_share_a_key_or_a_value_alone_compute_what_they_compute(shares_key: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(OneKeyOrValue(shares_key=shares_key) for _ in range(2))), torch.randn(2, LENGTH, HIDDEN)

    def loss(called: Any) -> Tensor:
        found: Tensor = called(x).square().sum()
        return found

    compilation = Compilation(model)
    assert_equal(gradients(model, loss, compilation.model), gradients(model, loss), 1e-5)
    assert len(compilation.regions) == 2


def check(
    inside: Callable[[Any, Tensor], Tensor], mask: Callable[[], Tensor | None], dtype: torch.dtype = torch.float32
) -> Compilation:
    """Check a model of two layers against eager, its outputs' strides too, and return its compilation."""
    torch.manual_seed(0)
    model = nn.Sequential(Attention(inside, mask), Attention(inside, mask)).to(dtype)
    x = torch.randn(2, LENGTH, HIDDEN, dtype=dtype)

    def loss(called: Any) -> Tensor:
        found: Tensor = called(x).square().mean()
        return found

    wanted = gradients(model, loss)
    compilation = Compilation(model)
    assert_equal(gradients(model, loss, compilation.model), wanted, 2e-6)
    assert compilation.model(x).stride() == model(x).stride()
    return compilation


class ByPositions(nn.Module):
    """Attention, as XLNet's, that adds scores by positions, which are alike in all examples and expanded to each."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between
        shapes = {"query": (HIDDEN, HEADS, 8), "key": (HIDDEN, HEADS, 8), "position": (HIDDEN, HEADS, 8),
                  "out": (HEADS, 8, HIDDEN)}  # fmt: skip
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) / 4))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        query, key = (torch.einsum("bih,hnd->bind", x, weight) for weight in (self.query, self.key))
        position = torch.einsum("bih,hnd->bind", positions.expand(len(x), -1, -1), self.position)
        position = self.between(position, key)
        scores = torch.einsum("bind,bjnd->bnij", query, key) + torch.einsum("bind,bjnd->bnij", query, position)
        context = torch.einsum("bnij,bjnd->bind", scores.softmax(-1), key)
        found: Tensor = x + torch.einsum("bind,ndh->bih", context, self.out)
        return found


class OfPositions(nn.Module):
    """Two layers, whose positions want a gradient, too."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ByPositions(between) for _ in range(2)])
        self.positions = nn.Parameter(torch.randn(1, LENGTH, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.positions)
        return x


BETWEEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as it is": lambda position, _: position,
    "beside a bias": lambda position, _: position + torch.linspace(0, 1, 8, dtype=position.dtype),
    "through a nonlinearity": lambda position, _: functional.gelu(position),
    "beside what differs": lambda position, key: position + key,
    "normalised": lambda position, _: functional.layer_norm(position, (8,)),
    "weighted": lambda position, _: position * position.square().mean(),
    "of one example": lambda position, _: position[:1] * torch.ones(3, 1, 1, 1, dtype=position.dtype),
    "turned over examples": lambda position, _: position.flip(0),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_the_product_of_what_is_expanded_is_made_once_for_all_that_is_alike(between: str) -> None:
    torch.manual_seed(0)
    model, x = OfPositions(BETWEEN[between]).double(), torch.randn(3, LENGTH, HIDDEN, dtype=torch.float64)

    def loss(called: Any) -> Tensor:
        found: Tensor = called(x).square().sum()
        return found

    compilation = Compilation(model)
    assert_equal(gradients(model, loss, compilation.model), gradients(model, loss), 1e-12)
    assert compilation.regions
    if between == "as it is":
        assert compilation.compiled[0].headline.startswith("2 of 2 regions run tuned (1 of 1 kinds): 100%")


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "both expanded": lambda position, _: torch.einsum("bih,bij->hj", position, position),
    "one expanded": lambda position, x: torch.einsum("bih,bij->hj", position, x),
    "the other expanded": lambda position, x: torch.einsum("bih,bij->hj", x, position),
    "flattened": lambda position, _: position.flatten(0, 1).t() @ position.flatten(0, 1),
}


class Summed(nn.Module):
    """A layer that multiplies by a product, which sums over examples of what is alike in all of them."""

    def __init__(self, made: Callable[[Tensor, Tensor], Tensor], *, projects_first: bool) -> None:
        super().__init__()
        self.made, self.projects_first = made, projects_first
        self.norm, self.weight, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.positions = nn.Parameter(torch.randn(1, LENGTH, HIDDEN) / 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.projects_first:
            position = self.weight(self.positions).expand(len(x), -1, -1)
        else:
            position = functional.linear(self.positions.expand(len(x), -1, -1), self.weight.weight)
        found: Tensor = x + self.out(functional.gelu(y @ self.made(position, y)))
        return found


@pytest.mark.parametrize("made", SUMS)
@pytest.mark.parametrize("projects_first", [True, False])
def test_a_sum_over_what_is_expanded_counts_each_time(made: str, projects_first: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Summed(SUMS[made], projects_first=projects_first) for _ in range(2))).double()
    x = torch.randn(3, LENGTH, HIDDEN, dtype=torch.float64)

    def loss(called: Any) -> Tensor:
        found: Tensor = called(x).square().sum()
        return found

    compilation = Compilation(model)
    assert_equal(gradients(model, loss, compilation.model), gradients(model, loss), 1e-12)
    assert compilation.regions
