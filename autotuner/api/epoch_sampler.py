"""A batch sampler that draws each epoch in another order, deals each step to ranks, and goes on where it was."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import distributed
from torch.utils.data import Sampler

from autotuner.errors import InputError


class EpochSampler(Sampler[list[int]]):
    """Yields the batches of one rank, as numbers of sequences.

    Args:
        lengths: of all sequences of the dataset, in tokens.
        ranks: processes that train together.
        rank: of this one.
        seed: of the order; the same on all ranks.
        numbers: others that are at least 1, by name.

    Attributes:
        epoch: the one that is drawn; `set_epoch` changes it.

    Raises:
        InputError: no sequences; a number that is below 1; a rank that is not one of them.
    """

    def __init__(self, lengths: Any, ranks: int, rank: int, seed: int, numbers: Mapping[str, int]) -> None:
        for name, value in {**numbers, "ranks": ranks}.items():
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise InputError(f"{name}={value!r}: give a whole number from 1 on")
        if not 0 <= rank < ranks:
            raise InputError(f"rank={rank}: of {ranks} ranks, give one from 0 to {ranks - 1}")
        given = np.asarray(lengths)
        if given.ndim != 1 or not len(given) or given.dtype.kind not in "iu" or given.min() < 1:
            raise InputError("lengths: give a list of whole numbers, the tokens of each sequence, at least 1 of each")
        self._lengths = given.astype(np.int64)
        self._ranks, self._rank, self._seed = ranks, rank, seed
        self.epoch = 0
        self._drawn, self._loaded = 0, 0

    @abstractmethod
    def _epoch_steps(self) -> Iterator[list[Any]]:
        """Yield the steps of an epoch: a batch for each rank, as arrays of numbers of sequences."""

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of this rank, as numbers of sequences; once after `load_state_dict`, what is left."""
        begin, self._loaded = self._loaded, 0
        self._drawn = begin
        for number, step in enumerate(self._epoch_steps()):
            if number >= begin:
                self._drawn = number + 1
                yield [int(sequence) for sequence in step[self._rank]]

    def lengths_of(self, numbers: Sequence[int]) -> list[int]:
        """Return the tokens of sequences, by their numbers."""
        return [int(length) for length in self._lengths[list(numbers)]]

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration draw the order of an epoch, as torch's `DistributedSampler` has it."""
        if epoch != self.epoch:
            self.epoch, self._drawn, self._loaded = epoch, 0, 0

    def state_dict(self, consumed: int | None = None) -> dict[str, int]:
        """Return where an epoch is, for `load_state_dict` of an equal sampler.

        Args:
            consumed: batches of the epoch that the loop has had; by default those that were drawn from this sampler,
                which are more where a loader has workers that draw ahead.
        """
        return {"epoch": self.epoch, "begin": self._drawn if consumed is None else consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Have the next iteration go on where another sampler was: with nothing, where that epoch was over."""
        self.epoch, self._loaded = state["epoch"], state["begin"]
        self._drawn = self._loaded


def own_rank(ranks: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of ranks and the own one: those of torch's process group where they are not given."""
    together = distributed.is_available() and distributed.is_initialized()
    if ranks is None:
        ranks = distributed.get_world_size() if together else 1
    if rank is None:
        rank = distributed.get_rank() if together else 0
    return ranks, rank
