"""Measuring policies: the numbers by which timings are taken, explained in `autotuner.measure`."""

from dataclasses import asdict, dataclass

from autotuner.errors import InputError
from autotuner.ir.device import CUDA
from autotuner.ir.records import Scalar


@dataclass(frozen=True, slots=True)
class Policy:
    """Part of the environment's key, because the same kernel reads differently under another value.

    Args:
        rotate_bytes: operand sets are added until their sum exceeds this.
        name: of the policy.
        sets: at most so many operand sets.
        sample_us: a sample lasts at least this long ...
        single_us: ... except that a call which takes longer than this is a sample by itself. A graph that rotates
            through all its operand sets takes at most about this long.
        samples_min: kept samples before a candidate can be settled.
        samples_max: kept samples at most.
        race_s: sampling time of one race, first looks not counted.
    """

    rotate_bytes: int
    name: str
    sets: int = 16
    sample_us: float = 200.0
    single_us: float = 20_000.0
    samples_min: int = 3
    samples_max: int = 10
    race_s: float = 5.0

    def __post_init__(self) -> None:
        if self.rotate_bytes < 0:
            raise InputError(f"rotate_bytes is {self.rotate_bytes}; write 0 for one operand set, or more")

    def facts(self) -> dict[str, Scalar]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CpuPolicy(Policy):
    """Policy of the CPU: a sample is a loop of calls.

    Args:
        apart_us: calls shorter than this are timed one by one, each after a few small operators of other kinds.
        half_rows: rows and columns of the product in bfloat16 among these. Some processors have no instructions for
            it: one of 128 rows took an EPYC with AVX2 1.5 ms, twelve times as long as all others together.
    """

    name: str = "cpu-rotate"
    apart_us: float = 1_000.0
    half_rows: int = 32


@dataclass(frozen=True, slots=True)
class CudaPolicy(Policy):
    """Policy of CUDA devices: a sample is one replay of a graph.

    Args:
        graphs: calls are timed as deployed, many in one CUDA graph; otherwise launched one by one, each after a flush
            of the second-level cache, so that operands are in no cache anyway.
    """

    name: str = CUDA
    graphs: bool = True
