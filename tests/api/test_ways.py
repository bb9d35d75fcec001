"""Ways to batch sequences of many lengths, compared by steps that run."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import autotuner
from autotuner.api import ways
from autotuner.api.length_batches import LengthBatches
from autotuner.errors import InputError


def lengths(count: int = 200) -> list[int]:
    drawn = np.random.default_rng(0).lognormal(3, 0.7, count)
    return [int(each) for each in np.clip(drawn, 4, 64)]


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=100
    )
    return transformers.BertForMaskedLM(config)


def test_an_epoch_takes_the_time_of_each_shape_as_often_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[list[tuple[int, ...]]] = []

    def timed(_: Any, batches: Sequence[Any]) -> tuple[float, int]:
        found = [tuple(batch["input_ids"].shape) for batch in batches]
        shapes.append(found)
        return sum(rows * length for rows, length in found) / len(found) * 1e-3, 1000 * len(shapes)

    monkeypatch.setattr("autotuner.api.ways._Steps.timed", timed)
    model, given = bert(), lengths()
    before = model.config._attn_implementation
    optimizer = torch.optim.AdamW(model.parameters())
    found = autotuner.compare_ways(model, optimizer, given, 8, sizes=3, tunes=False)
    one, few, packed = found.rows
    assert shapes[0] == [(8, 64)]
    assert isinstance(few.sampler, LengthBatches)
    assert sorted(shape for (shape,) in shapes[1:-1]) == [(8, length) for length in few.sampler.padded_lengths]
    assert shapes[-1] == [(1, 8 * 64)] * 4
    # A token of a batch takes a millisecond, so what is a second is the share that is filled.
    for row in found.rows:
        assert row.per_second == pytest.approx(1e3 * row.filled)
    assert (one.steps, few.steps) == (25, 25)
    assert one.epoch_s == pytest.approx(25 * 8 * 64e-3)
    assert few.epoch_s == pytest.approx(sum(8e-3 * few.sampler.padded_length(batch) for batch in few.sampler))
    assert one.filled == pytest.approx(sum(given) / (200 * 64))
    assert packed.filled > 0.9
    assert [row.peak_bytes for row in found.rows] == [1000, 4000, 5000]
    assert found.best is packed
    assert re.fullmatch(
        r"padded to the longest: \d+ tokens a second that are no padding; an epoch takes 25 steps and 12.8 s, \d+% "
        r"filled, 1 shape, 0.98 KiB\npadded to 3 lengths: .*, 3 shapes, 3.91 KiB\npacked into 512 tokens: .*, the most",
        str(found),
    ), str(found)
    assert model.config._attn_implementation == before
    assert not model._forward_pre_hooks


@pytest.mark.slow
def test_steps_run_and_leave_the_model_as_it_was() -> None:
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = [parameter.clone() for parameter in model.parameters()]
    found = autotuner.compare_ways(model, optimizer, lengths(40), 4, sizes=2, tunes=False, compiler="eager")
    assert [row.shapes for row in found.rows] == [1, 2, 1]
    assert all(row.epoch_s is not None and row.per_second > 0 and row.peak_bytes > 0 for row in found.rows)
    assert found.best is not None
    assert found.best.sampler is not None
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state


def test_a_model_that_cannot_run_packed_has_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotuner.api.ways._Steps.timed", lambda *_: (1.0, 1))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def batch_of(lengths: Sequence[int], width: int) -> Any:
        return torch.zeros(len(lengths), width)

    found = autotuner.compare_ways(model, optimizer, lengths(), 8, batch_of=batch_of)
    assert found.rows[-1].epoch_s is None
    assert str(found.rows[-1]) == "packed into 512 tokens: packed takes a model of transformers; given: Linear"
    with pytest.raises(InputError, match="Linear does not say how many words it knows: give batch_of"):
        autotuner.compare_ways(model, optimizer, lengths(), 8)
    monkeypatch.setattr(ways, "are_several", lambda: True)
    with pytest.raises(InputError, match="compare_ways measures in one process"):
        autotuner.compare_ways(model, optimizer, lengths(), 8, batch_of=batch_of)
