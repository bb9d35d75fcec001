"""Batches of several sizes, compared by steps that run."""

import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import autotuner
from autotuner.api.comparing import BatchComparison, BatchRow, MemoryPoint
from autotuner.api.survey import region_calls
from autotuner.errors import InputError, MissingError
from autotuner.runtime.step_needs import StepNeeds
from tests.runtime.capture.known import Known, planned


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
def test_batches_are_compared_within_a_budget_and_leave_the_model_as_it_was(tmp_path: Path) -> None:
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
    assert lines[4].startswith("  64 x 32 x 32: it needs ")
    assert lines[5:7] == ["under other budgets, as predicted:", lines[6]]
    assert lines[6].startswith(f"  from {found.front[0][1].budget_bytes / 2**20:.2f} MiB: ")
    assert found.best in (small, middle, large)
    assert sum("samples a second, the most; a step takes " in line for line in lines) == 1
    for row in (small, middle, large):
        assert row.needs is not None
        (now,) = [point for point in row.front if point.repeating == row.needs.repeating]
        assert now.budget_bytes == row.needs.predicted_bytes
        assert now.step_ms == pytest.approx(row.step_ms)
        assert [point.repeating for point in row.front] == sorted((p.repeating for p in row.front), reverse=True)
        assert len({point.per_second for point in row.front}) == len(row.front) >= 3
    budgets, speeds = zip(*((point.budget_bytes, point.per_second) for _, point in found.front), strict=True)
    assert (*budgets, *speeds) == (*sorted(budgets), *sorted(speeds))
    assert {row.shape[0] for row, _ in found.front} >= {2, found.best.shape[0]}
    found.save(tmp_path / "batches.svg")
    drawn = ElementTree.parse(tmp_path / "batches.svg")
    lines_drawn = [each for each in drawn.iter() if each.get("id", "").startswith("line2d_")]
    assert len(lines_drawn) > 2 * 3
    found.save(str(tmp_path / "batches.png"))
    assert (tmp_path / "batches.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_sizes_are_proposed_up_to_the_largest_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotuner.api.backend._knowledge", lambda _: Known())
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    asked: list[int] = []

    def batch_of(size: int) -> Tensor:
        asked.append(size)
        return of(size)

    budget = 9 << 20
    found = autotuner.compare_batches(
        model, optimizer, batch_of, loss_of, memory_budget=budget, example_inputs=None, compiler="eager", watch=None
    )
    assert asked[:2] == [8, 16]
    assert len(asked) == len(set(asked)) <= 6
    assert [row.samples for row in found.rows] == sorted(asked)
    ran = [row for row in found.rows if row.step_ms is not None and row.needs is not None]
    largest = ran[-1]
    assert largest.needs is not None
    assert largest.needs.repeating > 0
    a_sample = (largest.least_bytes - ran[0].least_bytes) / (largest.samples - ran[0].samples)  # type: ignore[operator]
    assert budget - 9 * a_sample < largest.least_bytes <= budget  # type: ignore[operator]  # one step of 8 is too much
    assert any(row.needs is not None and row.needs.repeating == 0 for row in ran)
    with pytest.raises(
        InputError, match=r"a batch of 8 samples was asked for, and its first tensor has .*\(4, 32, 32\)"
    ):
        autotuner.compare_batches(model, optimizer, lambda _: of(4), loss_of, memory_budget="1GiB")
    with pytest.raises(InputError, match="sizes_max is 0: write a number above 0"):
        autotuner.compare_batches(model, optimizer, batch_of, loss_of, memory_budget="1GiB", sizes_max=0)


def test_pictures_that_cannot_be_drawn_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = BatchComparison(1 << 30, (BatchRow((64, 32), 64, None, None, None, "it does not fit on the device"),))
    with pytest.raises(InputError, match=r"'batches.gif' ends in '.gif': a picture ends in .svg, .png, .pdf"):
        nothing.save("batches.gif")
    with pytest.raises(InputError, match="no batch can run within the budget, so there is nothing to draw"):
        nothing.save("batches.svg")
    needs = StepNeeds(1 << 30, 1 << 20, 1 << 20, 1 << 20, 0, 3, 0, 1.0, 1.0)
    row = BatchRow((8, 32), 8, None, 1.0, needs, "", (MemoryPoint(1 << 20, 1.0, 8000.0, 0),))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingError, match=r'a picture of batches needs matplotlib.*install "autotuner\[plot\]"'):
        BatchComparison(1 << 30, (row,)).save("batches.svg")


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
