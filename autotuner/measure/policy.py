"""How timings are taken: the numbers behind the words in `autotuner.measure`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autotuner.errors import InputError
from autotuner.ir.cost import working_set_bytes
from autotuner.ir.graph import Graph
from autotuner.ir.records import Scalar
from autotuner.measure.device import cache_bytes, cuda_l2_bytes, device_of, usable_threads

L2_FALLBACK_BYTES = 2 << 20
L2_MULTIPLE = 4
SMALL_SETS = 64
CUDA_L2_MULTIPLE = 2
"""What lies so many times beyond the cache comes from memory, whatever else is touched in between."""


@dataclass(frozen=True, slots=True)
class _Rotating:
    """What policies share: operands that rotate through so many bytes."""

    rotate_bytes: int

    def __post_init__(self) -> None:
        if self.rotate_bytes < 0:
            raise InputError(f"rotate_bytes is {self.rotate_bytes}; write 0 for one operand set, or more")

    def facts(self) -> dict[str, Scalar]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Policy(_Rotating):
    """What is part of the environment's key, because the same kernel reads differently under another value.

    Args:
        name: "cpu-rotate".
        rotate_bytes: operand sets are added until their sum exceeds this.
        sets: at most so many of them.
        sample_us: a sample is a loop of calls that lasts at least this long ...
        single_us: ... except that a call which takes longer than this is a sample by itself.
        apart_us: calls shorter than this are timed one by one, each after a few small operators of other kinds.
        samples_min: kept samples before a candidate can be settled.
        samples_max: kept samples at most.
        race_s: sampling time of one race, first looks not counted.
    """

    name: str = "cpu-rotate"
    sets: int = 16
    sample_us: float = 200.0
    single_us: float = 20_000.0
    apart_us: float = 1_000.0
    samples_min: int = 3
    samples_max: int = 10
    race_s: float = 5.0


@dataclass(frozen=True, slots=True)
class CudaPolicy(_Rotating):
    """The same for CUDA devices.

    Args:
        name: "cuda".
        graphs: calls are timed as deployed, many in one CUDA graph; otherwise launched one by one, each after a flush
            of the second-level cache.
        rotate_bytes: as `Policy`; without graphs, operands are in no cache anyway.
        sets: at most so many operand sets.
        sample_us: one replay of a graph, or the calls of a sample together, last at least this long ...
        single_us: ... and a graph that rotates through all its operand sets at most about this long.
        samples_min: kept samples before a candidate can be settled.
        samples_max: kept samples at most.
        race_s: sampling time of one race, first looks not counted.
    """

    name: str = "cuda"
    graphs: bool = True
    sets: int = 16
    sample_us: float = 200.0
    single_us: float = 20_000.0
    samples_min: int = 3
    samples_max: int = 10
    race_s: float = 5.0


AnyPolicy = Policy | CudaPolicy


def policy_for(
    device_type: str, threads: int | None = None, rotate_bytes: int | None = None, device_index: int = 0
) -> AnyPolicy:
    """Return the policy for a device.

    Raises:
        DeviceError: no such device here.
    """
    if device_type == "cpu":
        return cpu_policy(threads, rotate_bytes)
    device_of(device_type, device_index)
    return CudaPolicy(cuda_rotate_bytes(cuda_l2_bytes(device_index)) if rotate_bytes is None else rotate_bytes)


def policy_of(facts: Mapping[str, Any]) -> AnyPolicy:
    """Return the policy that some facts are of, by its name."""
    return CudaPolicy(**facts) if facts["name"] == "cuda" else Policy(**facts)


def cpu_policy(threads: int | None = None, rotate_bytes: int | None = None) -> Policy:
    """Return the policy for a number of threads.

    Where `rotate_bytes` is not stated, operands rotate through four times the second-level caches of these threads, in
    up to 64 sets: small ones too then come from beyond that level, as after the rest of a step.
    """
    if rotate_bytes is not None:
        return Policy(rotate_bytes)
    return Policy(L2_MULTIPLE * usable_threads(threads) * (cache_bytes(2) or L2_FALLBACK_BYTES), sets=SMALL_SETS)


def rotate_bytes(graph: Graph, device_type: str = "cpu", device_index: int = 0) -> int | None:
    """Return through how many bytes of operands a call is timed for a training graph, None for the policy's own.

    A step finds in cache what it touched last. Between two touches of a tensor lies anything from nothing (made, then
    read) to the whole step (weights, saved tensors): half the step's working set stands for both, rounded down to a
    power of two, so that models of about one size share measurements. The policy's own figure is the least on a CPU,
    whose last cache holds many such sets, and the most on a CUDA device, beyond whose cache there is only memory.
    """
    half = working_set_bytes(graph) // 2
    rounded = 1 << (half.bit_length() - 1)
    if device_type == "cpu":
        return rounded if rounded > cpu_policy().rotate_bytes else None
    device_of(device_type, device_index)
    return rounded if rounded < cuda_rotate_bytes(cuda_l2_bytes(device_index)) else None


def cuda_rotate_bytes(l2_bytes: int) -> int:
    """Return beyond how many bytes of operands nothing changes any more: a power of two, at least twice the cache."""
    return 1 << (CUDA_L2_MULTIPLE * l2_bytes - 1).bit_length()
