"""Batches of sequences that fill a number of tokens."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader

import autotuner
from autotuner.api.packed_batches import PackedBatches
from autotuner.errors import InputError
from tests.api.test_length_batches import lengths


@pytest.mark.parametrize(("ranks", "window"), [(1, 1), (1, 8), (4, 2), (4, 64)])
def test_sequences_come_once_an_epoch_and_batches_have_room_for_them(ranks: int, window: int) -> None:
    given = lengths(600)
    own = [list(PackedBatches(given, 128, window=window, ranks=ranks, rank=rank)) for rank in range(ranks)]
    assert len({len(each) for each in own}) == 1
    batches = [batch for each in own for batch in each]
    assert max(sum(given[sequence] for sequence in batch) for batch in batches) <= 128
    numbers = [sequence for batch in batches for sequence in batch]
    assert len(set(numbers)) == len(numbers)
    assert len(numbers) == 600 if ranks == 1 else sum(given[each] for each in numbers) > sum(given) - 128 * ranks


def test_batches_are_nearly_full_and_ranks_have_about_equal_attention() -> None:
    given = lengths(4000)
    one, eight = PackedBatches(given, 512), PackedBatches(given, 512, ranks=8)
    assert one.filled > 0.99
    assert eight.filled > 0.995
    assert eight.imbalance < 1.05
    unsorted = PackedBatches(given, 512, ranks=8, window=1)
    assert unsorted.imbalance > 1.2
    assert (
        str(one)
        == f"{len(one)} batches of 512 tokens, {one.filled:.1%} filled, by {4000 / len(one):.1f} sequences each"
    )
    assert "imbalance of ranks in attention 1.0" in str(eight)


def test_an_epoch_is_drawn_anew_and_goes_on_where_it_was_left() -> None:
    given = lengths(300)
    sampler = PackedBatches(given, 128, seed=3)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    drawn = iter(sampler)
    begun = [next(drawn) for _ in range(5)]
    again = PackedBatches(given, 128, seed=3)
    again.load_state_dict(sampler.state_dict())
    assert begun + list(again) == first
    assert len(sampler) == len(first)


def test_a_loader_and_a_packing_take_it() -> None:
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50
        )
    )
    texts = [{"input_ids": torch.full((length,), 7), "labels": torch.full((length,), 7)} for length in lengths(40)]
    sampler = autotuner.packed_batches([len(text["input_ids"]) for text in texts], 128)
    loader: DataLoader[Any] = DataLoader(
        texts,  # type: ignore[arg-type]
        batch_sampler=sampler, collate_fn=autotuner.packed(model, tokens=128),
    )  # fmt: skip
    batches = list(loader)
    assert {tuple(batch["input_ids"].shape) for batch in batches} == {(1, 128)}
    assert sum(int((batch["input_ids"] == 7).sum()) for batch in batches) == sum(lengths(40))
    assert all(bool(model(**batch).loss.isfinite()) for batch in batches[:2])


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ([5, 130], {}, "a sequence has 130 tokens, and a batch 128: cut it, or give more"),
        ([5], {"ranks": 2}, "1 sequences fill no step of 2 batches: give more"),
        ([5], {"window": 0}, "window=0: give a whole number from 1 on"),
        ([], {}, "lengths: give a list of whole numbers"),
        ([5], {"rank": 1}, "rank=1: of 1 ranks, give one from 0 to 0"),
    ],
)
def test_what_makes_no_batches_is_refused(given: list[int], options: dict[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        PackedBatches(np.array(given, dtype=np.int64), 128, **options)  # type: ignore[arg-type]
