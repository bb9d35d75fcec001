"""How timings are taken: the numbers behind the words in `autotuner.measure`."""

from dataclasses import asdict, dataclass

from autotuner.analysis import working_set_bytes
from autotuner.device import cache_bytes, usable_threads
from autotuner.errors import InputError
from autotuner.graph import Graph
from autotuner.records import Scalar

L2_FALLBACK_BYTES = 2 << 20
L2_MULTIPLE = 4
SMALL_SETS = 64


@dataclass(frozen=True, slots=True)
class Policy:
    """What is part of the environment's key, because the same kernel reads differently under another value.

    Args:
        name: "cpu-rotate", the only one so far.
        rotate_bytes: operand sets are added until their sum exceeds this.
        sets: at most so many of them.
        sample_us: a sample is a loop of calls that lasts at least this long ...
        single_us: ... except that a call which takes longer than this is a sample by itself.
        apart_us: calls shorter than this are timed one by one, each after a few small operators of other kinds.
        samples_min: kept samples before a candidate can be settled.
        samples_max: kept samples at most.
        race_s: sampling time of one race, first looks not counted.
    """

    rotate_bytes: int
    name: str = "cpu-rotate"
    sets: int = 16
    sample_us: float = 200.0
    single_us: float = 20_000.0
    apart_us: float = 1_000.0
    samples_min: int = 3
    samples_max: int = 10
    race_s: float = 5.0

    def __post_init__(self) -> None:
        if self.rotate_bytes < 0:
            raise InputError(f"rotate_bytes is {self.rotate_bytes}; write 0 for one operand set, or more")

    def facts(self) -> dict[str, Scalar]:
        return asdict(self)


def cpu_policy(threads: int | None = None, rotate_bytes: int | None = None) -> Policy:
    """Return the policy for a number of threads.

    Where `rotate_bytes` is not stated, operands rotate through four times the second-level caches of these threads, in
    up to 64 sets: small ones too then come from beyond that level, as after the rest of a step.
    """
    if rotate_bytes is not None:
        return Policy(rotate_bytes)
    return Policy(L2_MULTIPLE * usable_threads(threads) * (cache_bytes(2) or L2_FALLBACK_BYTES), sets=SMALL_SETS)


def rotate_bytes(graph: Graph) -> int | None:
    """Return through how many bytes of operands a call is timed for a training graph, None for the policy's least.

    A step finds in cache what it touched last. Between two touches of a tensor lies anything from nothing (made, then
    read) to the whole step (weights, saved tensors): half the step's working set stands for both, rounded down to a
    power of two, so that models of about one size share measurements.
    """
    half = working_set_bytes(graph) // 2
    rounded = 1 << (half.bit_length() - 1)
    return rounded if rounded > cpu_policy().rotate_bytes else None
