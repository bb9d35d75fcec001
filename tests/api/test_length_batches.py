"""Batches of sequences of many lengths."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import autotuner
from autotuner.api.length_batches import LengthBatches, padded_lengths
from autotuner.errors import InputError


def lengths(count: int = 400, longest: int = 64) -> list[int]:
    """Return lengths whose mean is about half of the longest."""
    drawn = np.random.default_rng(1).lognormal(3.3, 0.7, count)
    return [int(each) for each in np.clip(drawn, 1, longest)]


def padded(sizes: Sequence[int], given: Sequence[int]) -> int:
    return sum(min(size for size in sizes if size >= each) for each in given)


@pytest.mark.parametrize("seed", range(40))
def test_padded_lengths_are_those_with_the_least_padding(seed: int) -> None:
    generator = np.random.default_rng(seed)
    given = [int(each) for each in generator.integers(1, 30, generator.integers(1, 20))]
    sizes, multiple = int(generator.integers(1, 4)), int(generator.integers(1, 5))
    top = -(-max(given) // multiple) * multiple
    others = range(multiple, top, multiple)
    best = min(padded([*some, top], given) for count in range(sizes) for some in combinations(others, count))
    found = padded_lengths(given, sizes, multiple)
    assert len(found) <= sizes
    assert all(each % multiple == 0 for each in found)
    assert padded(found, given) == best


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("window", [1, 8])
def test_each_sequence_comes_once_an_epoch_on_one_rank(ranks: int, window: int) -> None:
    given = lengths()
    samplers = [
        LengthBatches(given, 4, ranks=ranks, rank=rank, window=window, drop_last=False, seed=3) for rank in range(ranks)
    ]
    epochs = []
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        seen = [list(sampler) for sampler in samplers]
        assert {len(found) for found in seen} == {len(samplers[0])}
        assert sorted(number for found in seen for batch in found for number in batch) == list(range(len(given)))
        epochs.append(seen)
    assert epochs[0] != epochs[1]
    samplers[0].set_epoch(0)
    assert list(samplers[0]) == epochs[0][0]


def test_what_fills_no_step_is_left_out_unless_it_is_asked_for() -> None:
    given = lengths(43)
    assert [len(batch) for batch in LengthBatches(given, 4, ranks=2)] == [4] * 5
    samplers = [LengthBatches(given, 4, ranks=2, rank=rank, drop_last=False) for rank in range(2)]
    seen = [list(sampler) for sampler in samplers]
    for sampler, found in zip(samplers, seen, strict=True):
        assert sorted(len(batch) for batch in found) == [2, 4, 4, 4, 4, 4]  # one of them comes twice
        assert len(sampler) == 6
    assert {number for found in seen for batch in found for number in batch} == set(range(43))
    few = LengthBatches([3], 4, ranks=2, rank=1, drop_last=False)
    assert (list(few), len(few)) == ([[0]], 1)


def test_what_is_left_out_is_another_each_epoch_however_long() -> None:
    sampler = LengthBatches(list(range(1, 101)), 8)
    seen: set[int] = set()
    for epoch in range(40):
        sampler.set_epoch(epoch)
        seen.update(number for batch in sampler for number in batch)
    assert seen == set(range(100))


def test_batches_have_few_lengths_and_little_padding() -> None:
    sampler = LengthBatches(lengths(4000), 4, sizes=4, window=64)
    seen = {sampler.padded_length(batch) for batch in sampler}
    assert seen == set(sampler.padded_lengths)
    assert len(seen) == 4
    whole, longest, own = sampler.ways()
    assert (whole.shapes, own.shapes) == (1, 4)
    assert whole.padding > 0.5 > longest.padding > 0.3 > 0.2 > own.padding
    assert "of the tokens are padding, 4 padded lengths, imbalance of ranks 1.000" in str(sampler)


@pytest.mark.parametrize("ranks, most", [(8, 1.05), (64, 1.06)])
def test_ranks_have_equal_work(ranks: int, most: float) -> None:
    sampler = LengthBatches(lengths(40_000), 4, ranks=ranks)
    _, random, own = sampler.ways()
    assert random.imbalance > 1.2
    assert own.imbalance < most


def test_steps_that_are_not_sorted_are_dealt_in_zig_zag() -> None:
    sampler = LengthBatches([8, 1, 7, 2, 6, 3, 5, 4], 4, ranks=2, window=1, multiple=1)
    other = LengthBatches([8, 1, 7, 2, 6, 3, 5, 4], 4, ranks=2, rank=1, window=1, multiple=1)
    (first,), (second,) = list(sampler), list(other)
    own = [8, 1, 7, 2, 6, 3, 5, 4]
    assert sorted(own[number] for number in first) == [1, 4, 5, 8]
    assert sorted(own[number] for number in second) == [2, 3, 6, 7]


def test_costs_are_those_of_the_slowest_rank() -> None:
    sampler = LengthBatches([4] * 8 + [8] * 8, 2, sizes=2, multiple=4, ranks=2)
    whole, _, own = sampler.ways(lambda rows, length: rows * length * 0.5)
    assert whole.cost == 4 * 2 * (2 * 8 * 0.5)
    assert own.cost == 2 * 2 * (2 * 8 * 0.5) + 2 * 2 * (2 * 4 * 0.5)
    assert (whole.tokens, own.tokens) == (96, 96)


def test_an_epoch_goes_on_where_it_was_left() -> None:
    given = lengths()
    sampler = LengthBatches(given, 4, seed=5)
    sampler.set_epoch(2)
    iterator = iter(sampler)
    before = [next(iterator) for _ in range(7)]
    state = sampler.state_dict()
    rest = list(iterator)
    again = LengthBatches(given, 4, seed=5)
    again.load_state_dict(state)
    assert list(again) == rest
    assert list(again) == before + rest
    again.load_state_dict(state)
    again.set_epoch(2)  # as a loop over epochs begins
    assert list(again) == rest
    assert list(again) == before + rest
    again.load_state_dict(sampler.state_dict())
    assert list(again) == []  # that epoch was over
    again.load_state_dict(sampler.state_dict(consumed=3))
    assert list(again) == [*before, *rest][3:]


def test_to_look_at_a_batch_leaves_the_epoch_as_it_is() -> None:
    sampler = LengthBatches(lengths(), 4)
    whole = list(sampler)
    next(iter(sampler))
    assert list(sampler) == whole


def test_a_loader_takes_it() -> None:
    given = lengths(40)
    data = [torch.full((length,), number) for number, length in enumerate(given)]
    sampler = autotuner.batches(given, 4, sizes=2)

    def collate(rows: list[torch.Tensor]) -> torch.Tensor:
        length = sampler.padded_length([int(row[0]) for row in rows])
        return torch.stack([torch.nn.functional.pad(row, (0, length - len(row)), value=-1) for row in rows])

    found = list(DataLoader(data, batch_sampler=sampler, collate_fn=collate))  # type: ignore[arg-type]
    assert len(found) == len(sampler) == 10
    assert {batch.shape[1] for batch in found} <= set(sampler.padded_lengths)
    assert sorted(int(row[0]) for batch in found for row in batch) == list(range(40))


@pytest.mark.parametrize("options, words", [
    ({"batch_size": 0}, r"^batch_size=0: give a whole number from 1 on"),
    ({"sizes": 1.5}, r"^sizes=1\.5: give a whole number from 1 on"),
    ({"ranks": 2, "rank": 2}, r"^rank=2: of 2 ranks, give one from 0 to 1"),
    ({"batch_size": 50}, r"^40 sequences fill no step of 50: give more, or drop_last=False"),
    ({"lengths": []}, r"^lengths: give a list of whole numbers"),
    ({"lengths": [3, 0]}, r"^lengths: give a list of whole numbers, the tokens of each sequence, at least 1"),
    ({"lengths": [1.9, 2.7]}, r"^lengths: give a list of whole numbers"),
    ({"lengths": "abc"}, r"^lengths: give a list of whole numbers"),
    ({"batch_size": True}, r"^batch_size=True: give a whole number"),
])  # fmt: skip
def test_what_makes_no_batches_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        LengthBatches(**{"lengths": lengths(40), "batch_size": 4, **options})  # type: ignore[arg-type]
