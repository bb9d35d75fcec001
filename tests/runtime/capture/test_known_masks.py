"""Masks that hide what comes later or is far, and padding: read as two where kernels take both, and skip the first."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autotuner.ir.graph import Operator
from autotuner.runtime.capture import constants
from autotuner.runtime.capture.additive import added_in_band
from autotuner.runtime.devices import device_runtime
from tests.runtime.capture.known import Compilation, assert_equal, gradients

LENGTH, EXACT = 6, 1e-12
Mask = Callable[[Tensor], Tensor]


class Decoder(nn.Module):
    """Attention of one layer, with a mask that it makes of which tokens count."""

    def __init__(self, mask: Mask, *, checkpoints: bool = False, attend: "Attend | None" = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.checkpoints, self.attend = mask, checkpoints, attend or attended
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        mask = self.mask(counts)
        for layer in self.layers:
            if self.checkpoints:
                x = x + checkpoint(self.attend, layer, x, mask, use_reentrant=False)
            else:
                x = x + self.attend(layer, x, mask)
        return x


def by_products(layer: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """As models write it out: a boolean mask as a choice, any other as a sum."""
    query, key, value = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in layer(x).chunk(3, -1))
    scores = query @ key.mT * 8**-0.5
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    found: Tensor = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
    return found


Attend = Callable[[nn.Module, Tensor, Tensor], Tensor]


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


def near_on_both_sides_and_keys(counts: Tensor) -> Tensor:
    queries, keys = places()
    return ((queries - keys).abs() <= 2) & counts[:, None, None, :]


def near_behind_and_keys(counts: Tensor) -> Tensor:
    queries, keys = places()
    return counts[:, None, None, :] & (keys > queries - 4) & (queries >= keys - 1)


def near_but_the_first_and_keys(counts: Tensor) -> Tensor:
    queries, keys = places()
    return ((queries - keys < 3) | (keys == 0)) & later() & counts[:, None, None, :]


def far_and_keys(counts: Tensor) -> Tensor:
    queries, keys = places()
    return (queries - keys > -9) & (queries - keys < 9) & counts[:, None, None, :]


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


CAUSAL: dict[str, dict[str, int]] = {"causal_mask": {}}
HALF_KNOWN: dict[str, tuple[Mask, dict[str, dict[str, int]]]] = {
    "as transformers makes it": (as_transformers, CAUSAL), "other way round": (other_way_round, CAUSAL),
    "not": (later_and_others, CAUSAL), "a window": (near_and_keys, {"window_mask": {"before": 2, "after": 0}}),
    "a window on both sides": (near_on_both_sides_and_keys, {"window_mask": {"before": 2, "after": 2}}),
    "a window from -3 to 1": (near_behind_and_keys, {"window_mask": {"before": 3, "after": 1}}),
}  # fmt: skip
"""With the operator that it is, beside a mask of keys, and its attributes."""
UNKNOWN = {
    "a window and the first": near_but_the_first_and_keys, "keys alone": far_and_keys,
    "without itself": strictly_later_and_keys, "queries": later_and_queries,
    "both": later_and_both, "or": later_or_keys, "changed in place": changed_in_place, "of one place": of_one_place,
}  # fmt: skip


def hiding(operators: Iterable[Operator]) -> dict[str, dict[str, Any]]:
    """Return the operators that hide what is outside of a band, with its sizes."""
    return {
        each.kind: {name: value for name, value in each.attributes if not name.endswith("axis")}
        for each in operators
        if each.kind in ("causal_mask", "window_mask")
    }


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("name", [*HALF_KNOWN, *UNKNOWN])
@pytest.mark.parametrize("has_triton", [True, False])
def test_padding_behind_a_causal_mask_or_a_window_is_a_mask_of_keys_and_no_other_mask_is(
    name: str, monkeypatch: pytest.MonkeyPatch, *, has_triton: bool, checkpoints: bool
) -> None:
    monkeypatch.setattr(type(device_runtime(torch.device("cpu"))), "has_triton", has_triton)
    mask, known = HALF_KNOWN[name] if name in HALF_KNOWN else (UNKNOWN[name], {})
    model = Decoder(mask, checkpoints=checkpoints).double()
    x, counts = torch.randn(5, LENGTH, 16).double(), which_count()
    compilation = Compilation(model)

    def loss(called: nn.Module) -> Tensor:
        made: Tensor = called(x, counts)
        return (made * torch.linspace(-1, 2, made.numel(), dtype=torch.double).view_as(made)).sum()

    assert_equal(gradients(model, loss, compilation.model), gradients(model, loss), EXACT)
    assert compilation.regions
    for region in compilation.regions:
        operators = region.plan.configuration.model.graph().operators
        specs = {each.kind: each.spec for each in operators}
        inputs = [len(port.dims) for port in region.plan.ports.inputs]
        assert hiding(operators) == (known if has_triton else {})
        if known and has_triton:
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
    ("mask", "known"),
    [(later_alone, CAUSAL), (as_transformers, CAUSAL), (places_from_three, CAUSAL), (keys_from_one, {}),
     (near_and_keys, {}), (other_way_round, {}), (near_behind_and_keys, {"window_mask": {"before": 3, "after": 1}})],
)  # fmt: skip
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_mask_that_is_too_large_to_compute_is_known_by_the_places_that_it_compares(
    mask: Mask, known: dict[str, dict[str, int]], monkeypatch: pytest.MonkeyPatch, *, checkpoints: bool
) -> None:
    monkeypatch.setattr(type(device_runtime(torch.device("cpu"))), "has_triton", True)
    monkeypatch.setattr(constants, "LIMIT", LENGTH**2 - 1)
    model = Decoder(mask, checkpoints=checkpoints).double()
    check_hiding(model, known)


def check_hiding(model: nn.Module, known: dict[str, dict[str, int]]) -> None:
    """Check that each region hides what is outside of a band by this operator, and that gradients are eager's."""
    x, counts = torch.randn(5, LENGTH, 16).double(), which_count()
    compilation = Compilation(model)
    found = gradients(model, lambda called: called(x, counts).square().sum(), compilation.model)
    assert_equal(found, gradients(model, lambda called: called(x, counts).square().sum()), EXACT)
    models = [region.plan.configuration.model for region in compilation.regions]
    assert models
    assert [hiding(each.graph().operators) for each in models] == [known] * len(models)


def in_window(queries: Tensor, keys: Tensor) -> Tensor:
    return (queries - keys < 3) & (keys <= queries)


def by_the_lowest_number(dtype: torch.dtype) -> Tensor:
    return torch.where(in_window(*places()), torch.zeros((), dtype=dtype), torch.finfo(dtype).min)


@pytest.mark.parametrize("written_out", [False, True])
@pytest.mark.parametrize(
    ("mask", "known"),
    [(lambda: in_window(*places()), {"window_mask": {"before": 2, "after": 0}}),
     (lambda: by_the_lowest_number(torch.float64), {"window_mask": {"before": 2, "after": 0}}),
     (lambda: by_the_lowest_number(torch.float64).clamp(min=-1e4), {}),
     (lambda: torch.zeros(LENGTH, LENGTH, dtype=torch.double).masked_fill(~later(), -torch.inf), CAUSAL)],
)  # fmt: skip
def test_a_constant_that_hides_what_is_far_is_a_window(
    mask: Callable[[], Tensor], known: dict[str, dict[str, int]], monkeypatch: pytest.MonkeyPatch, *, written_out: bool
) -> None:
    monkeypatch.setattr(type(device_runtime(torch.device("cpu"))), "has_triton", True)
    model = Decoder(lambda _: mask(), attend=by_products if written_out else attended).double()
    check_hiding(model, known)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scores_of_a_query_that_sees_nothing_stay_finite(dtype: torch.dtype) -> None:
    mask = as_transformers(which_count())[:, 0]
    added = added_in_band(mask, ([5, LENGTH, LENGTH], [0, 1, 2], [5, LENGTH, LENGTH]), dtype)
    assert added.shape == (5, LENGTH)
    assert torch.equal(added == 0, which_count())
    scores = torch.full((), -1000.0, dtype=dtype) + added
    assert scores.isfinite().all()
    assert (scores[~which_count()].double().exp() == 0).all()
