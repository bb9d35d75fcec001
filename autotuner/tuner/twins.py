"""Twins of a call: the same kernel in the same forms on operands of other extents, or timed in another environment.

What a kernel took for 34 sequences says what it takes for 36, and what it took under the driver of last week what it
takes today. It is an expectation: a twin names launch parameters to begin with, and what a call that is not measured
is likely to take. No twin passes for a measurement.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log

from autotuner.checkpoint import checkpoint
from autotuner.database import Database
from autotuner.ir.records import Attributes, Call, Candidate, Environment, Subgraph, digest
from autotuner.measure.roofline import Work, work_of
from autotuner.space import Cell, Space

FURTHEST = log(8)
"""Logarithms of the ratios of the extents of twins add up to no more than this, in the mean of their tensors. On an
H200, of calls of one layer with 10 to 79 sequences, half take what a twin says within 10 %, four in five within a
third."""

SHAPES = 8
"""Of each subgraph, so many others are read, the nearest in extents, those of later environments first: of some of them
little may have been measured, since they had twins themselves."""

STARTS = 3
"""A cell begins with so many of a twin's launch parameters, the fastest. On the same calls the best of three is within
2 % of the best that 24 trials found in three cells of four, and within 7 % in nine of ten."""

TRIALS = 8
"""Trials of a cell that begins so, in place of its own number."""

COVERED = 0.9
"""A tuning may end by twins where at least this share of the space's calls has one or is measured ..."""

TWINNED = 0.5
"""... and at least this share has one."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call that was measured, as a possible twin.

    Args:
        call: with its launch parameters.
        us: that it took, in microseconds.
    """

    call: Call
    us: float


class _Names(dict[Subgraph, str]):
    """Keys of subgraphs but for the extents of their tensors, made once."""

    def __missing__(self, subgraph: Subgraph) -> str:
        value = subgraph.to_json()
        tensors = [(tensor.axes, tensor.dtype) for tensor in subgraph.tensors]
        self[subgraph] = digest([value["nodes"], tensors, value["inputs"], value["outputs"]])
        return self[subgraph]


class Twins:
    """Records of the twins of a space's calls, on devices of the same name."""

    def __init__(self, recorded: Iterable[RecordedCall] = ()) -> None:
        """Keep what is recorded; of two calls that are as near, the later one counts."""
        self._by_form: dict[tuple[str, Candidate], list[RecordedCall]] = defaultdict(list)
        self._by_cell: dict[tuple[str, Candidate], list[RecordedCall]] = defaultdict(list)
        self._names = _Names()
        for each in recorded:
            name, candidate = self._names[each.call.subgraph], each.call.candidate
            self._by_form[name, candidate].append(each)
            self._by_cell[name, candidate.with_params(())].append(each)

    def starts(self, cell: Cell) -> tuple[Attributes, ...]:
        """Return the launch parameters with which a search begins, the fastest of the nearest twins first."""
        subgraph, bare = cell.call.subgraph, cell.call.candidate.with_params(())
        found = self._by_cell.get((self._names[subgraph], bare), []) if self._by_cell else []
        apart = [distance(subgraph, each.call.subgraph) for each in found]
        least = min(apart, default=0.0)
        nearest = [each for each, far in zip(found, apart, strict=True) if far <= least]
        ranked = dict.fromkeys(each.call.candidate.params for each in sorted(nearest, key=lambda each: each.us))
        admitted = set(cell.combinations) if ranked else ()
        return tuple(params for params in ranked if params in admitted)[:STARTS]

    def expected_us(self, calls: Mapping[str, Call]) -> dict[str, float]:
        """Return what calls are expected to take, by key; those without a twin are not there."""
        found = {}
        for key, call in calls.items() if self._by_form else ():
            checkpoint()
            own = self._by_form.get((self._names[call.subgraph], call.candidate), [])
            if own:
                twin = min(reversed(own), key=lambda each: distance(call.subgraph, each.call.subgraph))
                found[key] = twin.us * scale(work_of(call), work_of(twin.call))
        return found


NO_TWINS = Twins()


def known_twins(space: Space, database: Database, environment: Environment) -> Twins:
    """Return what a database has of the twins of a space's calls: of this environment, and of others of its device.

    Args:
        environment: in which the space is tuned; what it has of the space's own shapes are measurements, no twins.
    """
    own = {call.subgraph.signature: call.subgraph for call in space.calls.values()}
    own |= {cell.call.subgraph.signature: cell.call.subgraph for cell in space.cells}
    names = _Names()
    others: dict[str, list[tuple[int, str, Subgraph]]] = defaultdict(list)
    wanted = {names[subgraph] for subgraph in own.values()}
    for number, other in enumerate(database.environments()):
        if (other.device_type, other.device_name) == (environment.device_type, environment.device_name):
            for subgraph in database.subgraphs(other.key):
                checkpoint()
                is_measured = other.key == environment.key and subgraph.signature in own
                if names[subgraph] in wanted and not is_measured:
                    others[names[subgraph]].append((number, other.key, subgraph))
    chosen: dict[tuple[int, str], set[str]] = defaultdict(set)
    for subgraph in own.values():
        near = [
            (apart, -number, key, other.signature)
            for number, key, other in others[names[subgraph]]
            if (apart := distance(subgraph, other)) <= FURTHEST
        ]  # fmt: skip
        for _, number, key, signature in sorted(near)[:SHAPES]:
            chosen[-number, key].add(signature)
    return Twins(
        RecordedCall(call, us)
        for (_, key), signatures in sorted(chosen.items())
        for call, us in database.times(key, signatures)
    )


def distance(subgraph: Subgraph, other: Subgraph) -> float:
    """Return how far apart the extents of two subgraphs are that differ in nothing else; 0 where they are equal."""
    pairs = zip(subgraph.tensors, other.tensors, strict=True)
    apart = [
        abs(log(max(a, 1) / max(b, 1))) for one, its in pairs for a, b in zip(one.extents, its.extents, strict=True)
    ]  # fmt: skip
    return sum(apart) / len(subgraph.tensors)


def scale(work: Work, other: Work) -> float:
    """Return how many times another work a work is: that of what grows most, bytes or flop."""
    pairs = [(work.flop.get(dtype, 0.0), other.flop.get(dtype, 0.0)) for dtype in work.flop.keys() | other.flop.keys()]
    pairs.append((work.moved_bytes, other.moved_bytes))
    return max((own / its for own, its in pairs if its), default=1.0)
