"""Masks that hide what comes later, and padding: read as two where kernels take both, and skip the first."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autotuner.runtime.capture import constants
from autotuner.runtime.capture.additive import added_but_later
from autotuner.runtime.devices import device_runtime
from tests.runtime.capture.known import Compilation, assert_equal, gradients

LENGTH, EXACT = 6, 1e-12
Mask = Callable[[Tensor], Tensor]


class Decoder(nn.Module):
    """Attention of one layer, with a mask that it makes of which tokens count."""

    def __init__(self, mask: Mask, *, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.checkpoints = mask, checkpoints
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        mask = self.mask(counts)
        for layer in self.layers:
            if self.checkpoints:
                x = x + checkpoint(attended, layer, x, mask, use_reentrant=False)
            else:
                x = x + attended(layer, x, mask)
        return x


def attended(layer: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    query, key, value = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in layer(x).chunk(3, -1))
    return nn.functional.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2)


def places() -> tuple[Tensor, Tensor]:
    place = torch.arange(LENGTH)
    return place[None, None, :, None], place[None, None, None, :]


def later() -> Tensor:
    queries, keys = places()
    return keys <= queries


def as_transformers(counts: Tensor) -> Tensor:
    batch = torch.arange(counts.shape[0])[:, None, None, None]
    queries, keys = places()
    together = queries.new_ones((), dtype=torch.bool) & (keys <= queries) & counts[batch, keys]
    return together.expand(counts.shape[0], -1, LENGTH, LENGTH)


def other_way_round(counts: Tensor) -> Tensor:
    return torch.logical_and(counts[:, None, None, :], torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())


def near_and_keys(counts: Tensor) -> Tensor:
    queries, keys = places()
    return later() & (queries - keys < 3) & counts[:, None, None, :]


def strictly_later_and_keys(counts: Tensor) -> Tensor:
    queries, keys = places()
    return (keys < queries) & counts[:, None, None, :]


def later_and_queries(counts: Tensor) -> Tensor:
    return later() & counts[:, None, :, None]


def later_and_both(counts: Tensor) -> Tensor:
    return later() & counts[:, None, None, :] & counts[:, None, :, None]


def later_or_keys(counts: Tensor) -> Tensor:
    return later() | counts[:, None, None, :]


def later_and_others(counts: Tensor) -> Tensor:
    return later() & ~counts[:, None, None, :]


def changed_in_place(counts: Tensor) -> Tensor:
    mask = as_transformers(counts).clone()
    mask[:, :, :, 0] = True
    return mask


def of_one_place(counts: Tensor) -> Tensor:
    return (torch.zeros(1, 1).long() <= torch.zeros(1, 1).long()) & counts[:, None, None, :]


def which_count() -> Tensor:
    """Return tokens that count: with padding behind, before, around and in between, and nothing but padding."""
    rows = ["111111", "111000", "000111", "011010", "000000"]
    return torch.tensor([[each == "1" for each in row] for row in rows])


HALF_KNOWN = {"as transformers makes it": as_transformers, "other way round": other_way_round, "not": later_and_others}
UNKNOWN = {
    "a window": near_and_keys, "without itself": strictly_later_and_keys, "queries": later_and_queries,
    "both": later_and_both, "or": later_or_keys, "changed in place": changed_in_place, "of one place": of_one_place,
}  # fmt: skip


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("name", [*HALF_KNOWN, *UNKNOWN])
@pytest.mark.parametrize("has_triton", [True, False])
def test_padding_behind_a_causal_mask_is_a_mask_of_keys_and_no_other_mask_is(
    name: str, monkeypatch: pytest.MonkeyPatch, *, has_triton: bool, checkpoints: bool
) -> None:
    monkeypatch.setattr(type(device_runtime(torch.device("cpu"))), "has_triton", has_triton)
    model = Decoder((HALF_KNOWN | UNKNOWN)[name], checkpoints=checkpoints).double()
    x, counts = torch.randn(5, LENGTH, 16).double(), which_count()
    compilation = Compilation(model)

    def loss(called: nn.Module) -> Tensor:
        made: Tensor = called(x, counts)
        return (made * torch.linspace(-1, 2, made.numel(), dtype=torch.double).view_as(made)).sum()

    assert_equal(gradients(model, loss, compilation.model), gradients(model, loss), EXACT)
    assert compilation.regions
    for region in compilation.regions:
        specs = {each.kind: each.spec for each in region.plan.configuration.model.graph().operators}
        inputs = [len(port.dims) for port in region.plan.ports.inputs]
        is_parted = has_triton and name in HALF_KNOWN
        assert ("causal_mask" in specs) == is_parted
        if is_parted:
            assert len(specs["mask"].partition("->")[0].partition(",")[2]) == 2  # sequence and key
            assert sorted(inputs)[:2] == [2, 2]


def later_alone(counts: Tensor) -> Tensor:
    return later().expand(counts.shape[0], 1, LENGTH, LENGTH)


def places_from_three(counts: Tensor) -> Tensor:
    queries, keys = places()
    return (queries + 3 >= keys + 3) & counts[:, None, None, :]


def keys_from_one(counts: Tensor) -> Tensor:
    queries, keys = places()
    return (keys + 1 <= queries) & counts[:, None, None, :]


@pytest.mark.parametrize(
    ("mask", "is_causal"),
    [(later_alone, True), (as_transformers, True), (places_from_three, True), (keys_from_one, False),
     (near_and_keys, False), (other_way_round, False)],
)  # fmt: skip
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_mask_that_is_too_large_to_compute_is_known_by_the_places_that_it_compares(
    mask: Mask, monkeypatch: pytest.MonkeyPatch, *, is_causal: bool, checkpoints: bool
) -> None:
    monkeypatch.setattr(type(device_runtime(torch.device("cpu"))), "has_triton", True)
    monkeypatch.setattr(constants, "LIMIT", LENGTH**2 - 1)
    model = Decoder(mask, checkpoints=checkpoints).double()
    x, counts = torch.randn(5, LENGTH, 16).double(), which_count()
    compilation = Compilation(model)
    found = gradients(model, lambda called: called(x, counts).square().sum(), compilation.model)
    assert_equal(found, gradients(model, lambda called: called(x, counts).square().sum()), EXACT)
    kinds = [{each.kind for each in r.plan.configuration.model.graph().operators} for r in compilation.regions]
    assert {"causal_mask" in each for each in kinds} == {is_causal}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scores_of_a_query_that_sees_nothing_stay_finite(dtype: torch.dtype) -> None:
    mask = as_transformers(which_count())[:, 0]
    added = added_but_later(mask, ([5, LENGTH, LENGTH], [0, 1, 2], [5, LENGTH, LENGTH]), dtype)
    assert added.shape == (5, LENGTH)
    assert torch.equal(added == 0, which_count())
    scores = torch.full((), -1000.0, dtype=dtype) + added
    assert scores.isfinite().all()
    assert (scores[~which_count()].double().exp() == 0).all()
