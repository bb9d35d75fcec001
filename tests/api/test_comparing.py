"""Batches of several sizes, compared by steps that run."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import autotuner
from autotuner.api.survey import region_calls
from autotuner.errors import InputError
from tests.runtime.capture.known import planned


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(32, 4, 128, dropout=0.1, activation="gelu", batch_first=True) for _ in range(3))
    )


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def of(rows: int) -> Tensor:
    return torch.randn(rows, 32, 32)


@pytest.mark.slow
def test_batches_are_compared_within_a_budget_and_leave_the_model_as_it_was() -> None:
    model, batches = layers(), [of(2), of(4), of(8), of(64)]
    known = [planned(each) for each in region_calls(model, [(batch,) for batch in batches]).models.values()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before, generator = [parameter.clone() for parameter in model.parameters()], torch.get_rng_state()
    found = autotuner.compare_batches(
        model, optimizer, batches, loss_of, memory_budget="4.5MiB", configurations=known, compiler="eager", watch=None
    )
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert torch.equal(generator, torch.get_rng_state())
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1
    small, middle, large, huge = found.rows
    assert [row.shape for row in found.rows] == [(2, 32, 32), (4, 32, 32), (8, 32, 32), (64, 32, 32)]
    assert small.needs is not None
    assert middle.needs is not None
    assert large.needs is not None
    assert small.needs.repeating == 0 < large.needs.repeating
    assert small.needs.measured_bytes < middle.needs.measured_bytes <= large.needs.budget_bytes == 4.5 * 2**20
    assert (huge.step_ms, huge.per_second, huge.needs) == (None, 0.0, None)
    lines = str(found).splitlines()
    assert lines[0] == "within 4.50 MiB of memory:"
    assert lines[-1].startswith("  64 x 32 x 32: it needs ")
    assert found.best in (small, middle, large)
    assert sum("samples a second, the most; a step takes " in line for line in lines) == 1


def test_what_cannot_be_compared_is_refused() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(InputError, match="there are no batches to compare: give one of each size"):
        autotuner.compare_batches(model, optimizer, [], memory_budget="1GiB")
    with pytest.raises(
        InputError, match="the batch holds a set: give batches of tensors, in mappings, lists or tuples"
    ):
        autotuner.compare_batches(model, optimizer, [{1}], memory_budget="1GiB")
    with pytest.raises(InputError, match="is a batch without tensors"):
        autotuner.compare_batches(model, optimizer, [{}], memory_budget="1GiB")
    with pytest.raises(InputError, match="memory_budget is None: write a number of bytes, or one with a unit, such as"):
        autotuner.compare_batches(model, optimizer, [of(1)], memory_budget=None)  # type: ignore[arg-type]
