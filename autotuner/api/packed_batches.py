"""Batches of about as many tokens each, for packing: `autotuner.packed_batches`."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from autotuner.api.epoch_sampler import EpochSampler, own_rank
from autotuner.errors import InputError


class PackedBatches(EpochSampler):
    """A batch sampler: each batch has sequences that fill a number of tokens, for `autotuner.packed(tokens=...)`.

    Each epoch draws all sequences in another order. A window of that order fills batches, each sequence the fullest one
    that has room, the longest first. Of these batches, ranks get those whose attention is about equal work in one step;
    the order of steps is drawn. Each sequence comes once an epoch, but for those of fewer batches than there are ranks,
    the least filled, which are no step.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        tokens: int,
        *,
        window: int = 64,
        ranks: int = 1,
        rank: int = 0,
        seed: int = 0,
    ) -> None:
        """Take the lengths of sequences.

        Args:
            lengths: of all sequences of the dataset, in tokens.
            tokens: of a batch, on each rank, at most.
            window: steps whose sequences are put together; more fill better, and mix less.
            ranks: processes that train together.
            rank: of this one.
            seed: of the order; the same on all ranks.

        Raises:
            InputError: as `EpochSampler`; a sequence is longer than a batch; too few sequences for one step.
        """
        super().__init__(lengths, ranks, rank, seed, {"tokens": tokens, "window": window})
        if int(self._lengths.max()) > tokens:
            raise InputError(
                f"a sequence has {int(self._lengths.max()):,} tokens, and a batch {tokens:,}: cut it, or give more"
            )
        self._tokens, self._window = tokens, window
        self._of_epoch: tuple[int, list[list[Any]]] | None = None
        if not self._all_steps():
            raise InputError(f"{len(self._lengths)} sequences fill no step of {ranks} batches: give more")

    def __len__(self) -> int:
        """Return the number of batches of the epoch; another epoch may have a few more, or fewer."""
        return len(self._all_steps())

    def _epoch_steps(self) -> Iterator[list[Any]]:
        return iter(self._all_steps())

    def steps(self) -> list[list[Any]]:
        """Return this epoch's steps: a batch for each rank, as numbers of sequences."""
        return self._all_steps()

    @property
    def filled(self) -> float:
        """The share of the places in this epoch's batches that sequences fill."""
        steps = self._all_steps()
        tokens = sum(int(self._lengths[batch].sum()) for step in steps for batch in step)
        return tokens / (len(steps) * self._ranks * self._tokens)

    @property
    def imbalance(self) -> float:
        """The work of attention of the rank that has most, over the mean of all ranks, on average over steps."""
        work = [[self._attention(batch) for batch in step] for step in self._all_steps()]
        return float(np.mean([max(step) * len(step) / sum(step) for step in work]))

    def __str__(self) -> str:
        sequences = np.mean([len(batch) for step in self._all_steps() for batch in step])
        told = "" if self._ranks == 1 else f", imbalance of ranks in attention {self.imbalance:.3f}"
        return (
            f"{len(self)} batches of {self._tokens:,} tokens, {self.filled:.1%} filled, by {sequences:.1f} sequences "
            f"each{told}"
        )

    def _attention(self, batch: Any) -> int:
        """Return the work of a batch's attention, in products of a query and a key."""
        return int((self._lengths[batch] ** 2).sum())

    def _all_steps(self) -> list[list[Any]]:
        if self._of_epoch is None or self._of_epoch[0] != self.epoch:
            self._of_epoch = self.epoch, self._packed_steps()
        return self._of_epoch[1]

    def _packed_steps(self) -> list[list[Any]]:
        generator = np.random.default_rng([self._seed, self.epoch])
        order = generator.permutation(len(self._lengths))
        ends = np.cumsum(self._lengths[order]) // (self._window * self._ranks * self._tokens)
        cuts = np.flatnonzero(np.diff(ends)) + 1
        steps: list[list[Any]] = []
        left = np.empty(0, dtype=np.int64)
        for number, part in enumerate(np.split(order, cuts)):
            batches = self._filled(np.concatenate([left, part]))
            batches.sort(key=lambda batch: -int(self._lengths[batch].sum()))
            steps_there = len(batches) // self._ranks
            if number < len(cuts) and steps_there * self._ranks == len(batches):
                steps_there -= 1  # the least filled ones: their sequences go on to the next window
            whole = steps_there * self._ranks
            kept = sorted(batches[:whole], key=self._attention)
            left = np.concatenate([*batches[whole:], np.empty(0, dtype=np.int64)])
            own = [kept[begin : begin + self._ranks] for begin in range(0, len(kept), self._ranks)]
            steps += [own[place] for place in generator.permutation(len(own))]
        return steps

    def _filled(self, sequences: Any) -> list[Any]:
        """Put sequences into batches: each, the longest first, into the fullest batch that has room (best fit)."""
        batches: list[list[int]] = []
        rooms: list[tuple[int, int]] = []  # room and number of each batch, in order
        for sequence in sequences[np.argsort(-self._lengths[sequences], kind="stable")]:
            length = int(self._lengths[sequence])
            place = bisect_left(rooms, (length, 0))
            if place == len(rooms):
                batches.append([])
                room, number = self._tokens, len(batches) - 1
            else:
                room, number = rooms.pop(place)
            batches[number].append(int(sequence))
            insort(rooms, (room - length, number))
        return [np.array(batch) for batch in batches]


def packed_batches(
    lengths: Sequence[int],
    tokens: int,
    *,
    window: int = 64,
    ranks: int | None = None,
    rank: int | None = None,
    seed: int = 0,
) -> PackedBatches:
    """Return a batch sampler for packing: sequences of many lengths that fill batches of a number of tokens.

    `DataLoader(dataset, batch_sampler=sampler, collate_fn=autotuner.packed(model, tokens=tokens))` takes it;
    `print(sampler)` says how well batches are filled.

    Args:
        lengths: as in `PackedBatches`; so are tokens, window and seed.
        ranks: processes that train together; by default those of torch's process group.
        rank: of this one; by default its own.

    Raises:
        InputError: as `PackedBatches`.
    """
    ranks, rank = own_rank(ranks, rank)
    return PackedBatches(lengths, tokens, window=window, ranks=ranks, rank=rank, seed=seed)
