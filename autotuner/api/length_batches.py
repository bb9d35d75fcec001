"""Batches of sequences of many lengths: few padded lengths, little padding, and equal work for each rank."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotuner.api.epoch_sampler import EpochSampler, own_rank
from autotuner.errors import InputError

Cost = Callable[[int, int], float]
"""Returns what a step takes, in seconds or any other unit, of so many sequences that are padded to one length."""
STEPS_SEEN = 200
"""Steps of an epoch that a prediction looks at."""


@dataclass(frozen=True)
class WayOfBatching:
    """The cost of steps of an epoch that is batched in one way, as many as were looked at.

    Args:
        name: of the way.
        shapes: how many padded lengths there are.
        tokens: of the sequences.
        padded_tokens: of the batches, padding among them.
        cost: of these steps, in the unit that was given: of each, that of the slowest rank times the number of ranks.
            None where no cost was given.
        imbalance: the work of the rank that has most, over the mean of all ranks, on average over steps.
    """

    name: str
    shapes: int
    tokens: int
    padded_tokens: int
    cost: float | None
    imbalance: float

    @property
    def padding(self) -> float:
        """The share of padding in all tokens of the batches."""
        return 1 - self.tokens / max(self.padded_tokens, 1)

    def __str__(self) -> str:
        speed = "" if self.cost is None else f", {self.tokens / self.cost:,.4g} tokens a rank in a unit of cost"
        return (
            f"{self.name}: {self.padding:.1%} of the tokens are padding, {self.shapes} padded lengths{speed}, "
            f"imbalance of ranks {self.imbalance:.3f}"
        )


class LengthBatches(EpochSampler):
    """A batch sampler: each batch has sequences that are padded to one of a few lengths.

    Each epoch draws all sequences in another order. In a window of that order, sequences are sorted by length and cut
    into steps, whose order is drawn again. So each sequence comes once an epoch, in random company of its like, but
    for a few that fill no step. The sequences of a step are dealt to ranks in zig-zag, so that all have about equal
    work (as in Breaking MLPerf Training, 2024).

    Attributes:
        padded_lengths: the lengths that batches are padded to, in order.
        epoch: the one that is drawn; `set_epoch` changes it.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        *,
        sizes: int = 4,
        multiple: int = 8,
        window: int = 64,
        ranks: int = 1,
        rank: int = 0,
        seed: int = 0,
        drop_last: bool = True,
    ) -> None:
        """Choose the padded lengths, such that the least padding is needed.

        Args:
            lengths: of all sequences of the dataset, in tokens.
            batch_size: sequences of a batch, on each rank.
            sizes: how many padded lengths there may be: each is a shape of its own, which is compiled and tuned.
            multiple: padded lengths are multiples of it.
            window: steps in which sequences are sorted; 1 sorts nothing, and batches have all lengths.
            ranks: processes that train together.
            rank: of this one.
            seed: of the order; the same on all ranks.
            drop_last: whether sequences are left out that fill no step, other ones each epoch. Otherwise one step has
                smaller batches, of equal size on all ranks, for which a few sequences may come twice.

        Raises:
            InputError: no sequences, or too few for one step; a number that is below 1; a rank that is not one of them.
        """
        numbers = {"batch_size": batch_size, "sizes": sizes, "multiple": multiple, "window": window}
        super().__init__(lengths, ranks, rank, seed, numbers)
        if drop_last and len(self._lengths) < batch_size * ranks:
            raise InputError(
                f"{len(self._lengths)} sequences fill no step of {batch_size * ranks}: give more, or drop_last=False"
            )
        self._batch_size, self._window, self._drop_last, self._multiple = batch_size, window, drop_last, multiple
        self.padded_lengths = padded_lengths(self._lengths, sizes, multiple)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        whole, rest = divmod(len(self._lengths), self._batch_size * self._ranks)
        return whole + (rest > 0 and not self._drop_last)

    def _epoch_steps(self) -> Iterator[list[Any]]:
        return self._steps(self._window)

    def padded_length(self, batch: Sequence[int]) -> int:
        """Return the length that sequences of a batch are padded to, by their numbers.

        Ranks have equal shapes in a step whose sequences are all padded to one length: most are, as they are sorted.
        """
        longest = int(self._lengths[list(batch)].max())
        return next(length for length in self.padded_lengths if length >= longest)

    def ways(self, cost: Cost | None = None) -> list[WayOfBatching]:
        """Return what an epoch costs as it is batched here, and otherwise, by looking at some steps of it.

        Args:
            cost: of a step of one rank, measured or estimated.
        """
        longest = self.padded_lengths[-1]
        multiples = -(-self._lengths // self._multiple) * self._multiple

        def to_sizes(batch: Any) -> int:
            return self.padded_length(batch)

        def to_longest(batch: Any) -> int:
            return int(multiples[batch].max())

        return [
            self._way("all padded to the longest of the dataset", 1, lambda _: longest, cost, deals=False),
            self._way("padded to the longest of the batch", 1, to_longest, cost, deals=False),
            self._way("as this sampler batches", self._window, to_sizes, cost, deals=True),
        ]

    def __str__(self) -> str:
        lengths = ", ".join(map(str, self.padded_lengths))
        lines = [
            f"{len(self)} batches of {self._batch_size} sequences, padded to {lengths} tokens",
            *map(str, self.ways()),
        ]
        return "\n".join(lines)

    def _way(
        self, name: str, window: int, padded: Callable[[Any], int], cost: Cost | None, deals: bool
    ) -> WayOfBatching:
        tokens = padded_tokens = 0
        whole, unequal, steps = 0.0, 0.0, 0
        seen: set[int] = set()
        for step in self._steps(window, deals):
            shapes = [(len(batch), padded(batch)) for batch in step]
            seen.update(length for _, length in shapes)
            work = [rows * length if cost is None else cost(rows, length) for rows, length in shapes]
            tokens += int(sum(self._lengths[batch].sum() for batch in step))
            padded_tokens += sum(rows * length for rows, length in shapes)
            whole += max(work) * self._ranks
            unequal += max(work) * len(work) / sum(work)
            steps += 1
            if steps == STEPS_SEEN:
                break
        return WayOfBatching(
            name, len(seen), tokens, padded_tokens, None if cost is None else whole, unequal / max(steps, 1)
        )

    def _steps(self, window: int, deals: bool = True) -> Iterator[list[Any]]:
        """Yield the steps of an epoch: a batch for each rank, as arrays of numbers of sequences."""
        generator = np.random.default_rng([self._seed, self.epoch])
        order = generator.permutation(len(self._lengths))
        of_step = self._batch_size * self._ranks
        rest = len(order) % of_step
        if rest and self._drop_last:
            order = order[: len(order) - rest]  # before any sorting: which ones are left out is drawn, too
        elif rest % self._ranks:
            order = np.concatenate([order, np.resize(order, self._ranks - rest % self._ranks)])
        for start in range(0, len(order), window * of_step):
            part = order[start : start + window * of_step]
            if window > 1:
                part = part[np.argsort(self._lengths[part], kind="stable")]
            cuts = [part[begin : begin + of_step] for begin in range(0, len(part), of_step)]
            for place in generator.permutation(len(cuts)) if window > 1 else range(len(cuts)):
                yield self._dealt(cuts[place]) if deals else np.array_split(cuts[place], self._ranks)

    def _dealt(self, step: Any) -> list[Any]:
        """Deal the sequences of a step to ranks in zig-zag, the longest first."""
        ordered = step[np.argsort(-self._lengths[step], kind="stable")]
        turn = np.arange(len(ordered)) % (2 * self._ranks)
        to = np.where(turn < self._ranks, turn, 2 * self._ranks - 1 - turn)
        return [ordered[to == rank] for rank in range(self._ranks)]


def padded_lengths(lengths: Any, sizes: int, multiple: int) -> list[int]:
    """Return a few lengths to pad to, with the least padding in all: each sequence is padded to the next of them.

    Args:
        lengths: of the sequences, an array of whole numbers.
        sizes: how many there are at most.
        multiple: each is one of it.

    Cost:
        O(sizes * n**2) for n multiples that occur.
    """
    ends, counts = np.unique(-(-np.asarray(lengths) // multiple), return_counts=True)
    ends, below = np.concatenate([[0], ends]), np.concatenate([[0], np.cumsum(counts)])
    number = len(counts)
    # Of each end, the least padded tokens, in multiples, of all sequences up to it; and the size before that gives it.
    least = np.where(below == 0, 0.0, np.inf)
    least[1:] = (ends * below)[1:]
    chosen = [np.zeros(number + 1, dtype=np.int64)]
    for _ in range(min(sizes, number) - 1):
        total = least[:, None] + ends[None, :] * (below[None, :] - below[:, None])
        total[ends[:, None] > ends[None, :]] = np.inf
        chosen.append(total.argmin(axis=0))
        least = total.min(axis=0)
    found, end = [], number
    for before in reversed(chosen):
        if end:
            found.append(int(ends[end]) * multiple)
        end = before[end]
    return sorted(set(found))


def batches(
    lengths: Sequence[int],
    batch_size: int,
    *,
    sizes: int = 4,
    multiple: int = 8,
    window: int = 64,
    ranks: int | None = None,
    rank: int | None = None,
    seed: int = 0,
    drop_last: bool = True,
) -> LengthBatches:
    """Return a batch sampler for sequences of many lengths: few padded lengths, little padding, ranks in balance.

    `DataLoader(dataset, batch_sampler=sampler, collate_fn=...)` takes it; the function pads to
    `sampler.padded_length(numbers)`, or to the next of `sampler.padded_lengths`. `print(sampler)` says how much padding
    there is, here and otherwise; `sampler.ways(cost)` also what that costs.

    Args:
        lengths: as in `LengthBatches`; so are batch_size, sizes, multiple, window, seed and drop_last.
        ranks: processes that train together; by default those of torch's process group.
        rank: of this one; by default its own.

    Raises:
        InputError: as `LengthBatches`.
    """
    ranks, rank = own_rank(ranks, rank)
    return LengthBatches(
        lengths, batch_size, sizes=sizes, multiple=multiple, window=window, ranks=ranks, rank=rank, seed=seed,
        drop_last=drop_last,
    )  # fmt: skip
