"""Steps of Adam and AdamW over many parameters at once, from tables of addresses in device memory."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from math import inf, log

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotuner.kernels.triton.adam_program import counted_steps, moved_chunk

CHUNK, WARPS = 1024, 4
"""Elements of a program, and its warps: within 1 % of the best of a sweep on an H200."""
LANES = 128
COLUMNS = 6
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Numbers:
    """Hyperparameters of a group; the learning rate is a tensor of its own."""

    betas: tuple[float, float]
    epsilon: float
    decay: float
    is_decoupled: bool


@dataclass(frozen=True)
class Moved:
    """A parameter with what moves it: tensors of one type, one shape and one order in memory, without holes.

    Attributes:
        counter: of its steps, one float32 on the device.
    """

    value: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    counter: Tensor

    def row(self) -> list[int]:
        four = (self.value, self.gradient, self.first, self.second)
        return [*(each.data_ptr() for each in four), self.value.numel(), self.counter.data_ptr()]

    @property
    def is_aligned(self) -> bool:
        return all(address % 16 == 0 for address in self.row()[:4])


def chunks(count: int) -> int:
    """Return how many programs a parameter of so many elements takes."""
    return -(-count // CHUNK)


@dataclass(frozen=True)
class _Launch:
    """Parameters of one type, one group and one alignment; where their rows and places begin, and of how many."""

    moved: tuple[Moved, ...]
    rate: Tensor
    numbers: Numbers
    row: int
    place: int
    programs: int


class AdamTables:
    """Steps of many parameters, and the tables in device memory that their programs read when they run.

    So a step can be captured first, and its tables written behind that.

    Args:
        parameters: so many at most.
        chunks: so many at most, of all parameters together.
    """

    def __init__(self, parameters: int, chunks: int, device: torch.device) -> None:
        self._rows = torch.zeros((parameters, COLUMNS), dtype=torch.int64, device=device)
        self._places = torch.zeros((chunks, 2), dtype=torch.int32, device=device)
        self._corrections = torch.empty((parameters, 2), dtype=torch.float32, device=device)
        self.clear()

    def clear(self) -> None:
        """Forget all parameters, and let their memory go; what is written stays."""
        self._launches: list[_Launch] = []
        self._given: list[list[int]] = []
        self._chunks: list[Tensor] = []
        self._placed = 0

    def add(self, moved: Sequence[Moved], rate: Tensor, numbers: Numbers) -> bool:
        """Add parameters of one type and one group, and say whether there was place for them.

        Args:
            rate: the learning rate, one float32 on the device.
        """
        for is_aligned in (True, False):
            some = tuple(each for each in moved if each.is_aligned == is_aligned)
            if some:
                counts = torch.tensor([chunks(each.value.numel()) for each in some])
                self._launches.append(_Launch(some, rate, numbers, len(self._given), self._placed, int(counts.sum())))
                self._given += [each.row() for each in some]
                self._chunks.append(counts)
                self._placed += int(counts.sum())
        return len(self._given) <= len(self._rows) and self._placed <= len(self._places)

    def launch(self, factor: Tensor | None = None) -> None:
        """Launch a step of all parameters.

        Args:
            factor: what gradients are multiplied by, one float32 on the device; None for 1. They stay as they are.
        """
        for each in self._launches:
            rows, places = self._rows[each.row :], self._places[each.place :]
            corrections, numbers = self._corrections[each.row :], each.numbers
            one, two = map(float, numbers.betas)
            with torch.cuda.device(each.rate.device) if each.rate.is_cuda else nullcontext():
                counted_steps[(triton.cdiv(len(each.moved), LANES),)](
                    table=rows, rates=each.rate, corrections=corrections, count=len(each.moved), log_one=_log(one),
                    log_two=_log(two), LANES=LANES,
                )  # fmt: skip
                moved_chunk[(each.programs,)](
                    table=rows, places=places, factors=corrections if factor is None else factor, rates=each.rate,
                    corrections=corrections, beta_one=one, rest_one=1 - one, beta_two=two, rest_two=1 - two,
                    epsilon=float(numbers.epsilon), decay=float(numbers.decay),
                    TYPE=TYPES[each.moved[0].value.dtype], SCALED=factor is not None, DECOUPLED=numbers.is_decoupled,
                    ALIGNED=each.moved[0].is_aligned, CHUNK=CHUNK, num_warps=WARPS,
                )  # fmt: skip

    def write(self) -> None:
        """Write the tables."""
        if self._given:
            self._rows[: len(self._given)].copy_(torch.tensor(self._given))
            self._places[: self._placed].copy_(torch.cat([_places(counts) for counts in self._chunks]))


def _places(counts: Tensor) -> Tensor:
    """Return the number of its parameter, and that of its chunk, for each program of a launch."""
    parameters = torch.arange(len(counts)).repeat_interleave(counts)
    begins = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return torch.stack([parameters, torch.arange(len(parameters)) - begins], dim=1).int()


def _log(beta: float) -> float:
    return log(beta) if beta else -inf


@cache
def compile_for(dtype: torch.dtype, device: torch.device, *, is_decoupled: bool, is_scaled: bool = False) -> None:
    """Compile and load the programs for parameters of a type, by a step of a made-up parameter.

    Args:
        is_decoupled: whether the decay is AdamW's.
        is_scaled: whether gradients are multiplied by a factor.

    Raises:
        Exception: whatever Triton ends with.
    """
    for shift in (0, 1):
        one, two, three, four = (torch.zeros(65, dtype=dtype, device=device)[shift : 64 + shift] for _ in range(4))
        tables = AdamTables(1, 1, device)
        rate, numbers = torch.zeros((), device=device), Numbers((0.9, 0.999), 1e-8, 0.0, is_decoupled)
        tables.add([Moved(one, two, three, four, torch.zeros((), device=device))], rate, numbers)
        tables.write()
        tables.launch(torch.ones((), device=device) if is_scaled else None)
