"""The tuned share of a compiled model, and the rest: shares of the flop of its forward, by modules."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from weakref import ref

from torch import Tensor

LINES = 6
"""So many parts that are left out are told; all further ones are told as one."""


@dataclass(frozen=True)
class LeftOut:
    """Calls of a model's forward that do not run tuned, alike in module and reason.

    Args:
        module: path of the module that makes them, with `*` for the number of a layer; "" for the model itself.
        calls: how many there are, in all layers.
        flop: of all of them.
        reason: why they do not.
    """

    module: str
    calls: int
    flop: int
    reason: str

    def __str__(self) -> str:
        return f"{self.module or 'the model itself'}: {self.reason}"


@dataclass(frozen=True)
class TunedPart:
    """Calls of a module that run tuned.

    Args:
        module: path of the module, as in `LeftOut`.
        flop: of all of them.
    """

    module: str
    flop: int


@dataclass(frozen=True)
class PlannedPart:
    """The share of a module in the plans of tuned regions: of kernels whose operators are all of it, or within it.

    Args:
        module: path of the module, as in `LeftOut`; of operators of several modules, the one that holds them all.
        us: of these kernels in a training step, forward and backward, as they were measured.
        kept_bytes: what these operators leave for backward, as planned.
    """

    module: str
    us: float
    kept_bytes: int


@dataclass(frozen=True)
class Coverage:
    """The part of a forward that runs tuned, in flop as torch counts them: of matrix products, convolutions, attention.

    Args:
        flop: of the forward.
        tuned_flop: of what runs tuned.
        left_out: all else, the heaviest first; calls without flop only inside of layers, where a rule refused them.
        tuned: what runs tuned, by module, the heaviest first.
        planned: what the plans of tuned regions tell of modules, the slowest first.
    """

    flop: int = 0
    tuned_flop: int = 0
    left_out: tuple[LeftOut, ...] = ()
    tuned: tuple[TunedPart, ...] = ()
    planned: tuple[PlannedPart, ...] = ()

    @property
    def tuned_share(self) -> float:
        """The share of the flop that runs tuned; 0 where there is none."""
        return self.tuned_flop / self.flop if self.flop else 0.0

    @property
    def lines(self) -> list[str]:
        """A line for each part that is left out."""
        if not self.left_out:
            return []
        heavy = [each for each in self.left_out if each.flop] or list(self.left_out)
        rest = heavy[LINES:] if len(heavy) > LINES + 1 else []
        told = heavy[: len(heavy) - len(rest)]
        lines = [f"{percent(each.flop, self.flop):>5}  {each}" for each in told]
        if rest:
            lines.append(f"{percent(sum(each.flop for each in rest), self.flop):>5}  {len(rest)} other parts")
        return ["left out, heaviest first:", *lines]

    @classmethod
    def of_all(cls, found: Iterable["Coverage"]) -> "Coverage":
        """Return several coverages as one."""
        each = list(found)
        parts = merged(part for one in each for part in one.left_out)
        tuned = tuned_parts((part.module, part.flop) for one in each for part in one.tuned)
        planned = planned_parts(part for one in each for part in one.planned)
        return cls(sum(one.flop for one in each), sum(one.tuned_flop for one in each), parts, tuned, planned)


def merged(parts: Iterable[LeftOut]) -> tuple[LeftOut, ...]:
    """Return parts of which those alike are one, the heaviest first."""
    calls: Counter[tuple[str, str]] = Counter()
    flop: Counter[tuple[str, str]] = Counter()
    for part in parts:
        calls[part.module, part.reason] += part.calls
        flop[part.module, part.reason] += part.flop
    found = [LeftOut(module, count, flop[module, reason], reason) for (module, reason), count in calls.items()]
    return tuple(sorted(found, key=lambda part: (-part.flop, -part.calls, part.module, part.reason)))


def tuned_parts(calls: Iterable[tuple[str, int]]) -> tuple[TunedPart, ...]:
    """Return calls that run tuned, each a module and its flop, by module, the heaviest first."""
    flop: Counter[str] = Counter()
    for module, count in calls:
        flop[module] += count
    return tuple(TunedPart(module, count) for module, count in flop.most_common() if count)


def planned_parts(parts: Iterable[PlannedPart]) -> tuple[PlannedPart, ...]:
    """Return parts of which those of one module are one, the slowest first."""
    found: dict[str, PlannedPart] = {}
    for part in parts:
        known = found.get(part.module, PlannedPart(part.module, 0.0, 0))
        found[part.module] = PlannedPart(part.module, known.us + part.us, known.kept_bytes + part.kept_bytes)
    return tuple(sorted(found.values(), key=lambda part: (-part.us, -part.kept_bytes, part.module)))


def percent(part: float, whole: float) -> str:
    """Return a share such that only nothing is 0%, and only everything 100%."""
    share = part / whole if whole else 0.0
    if 0 < share < 0.01:
        return "<1%"
    return ">99%" if 0.99 < share < 1 else f"{share:.0%}"


@dataclass(frozen=True)
class CompiledGraph:
    """One graph that was compiled: its regions, and which of them run tuned. `str` gives sentences.

    Args:
        regions: how often each region occurs, by the name of its model.
        tuned: names of those that run tuned.
        nodes: calls in the graph.
        reasons: how many of its nodes are left to the other compiler, by why.
        note: what is done about those that are not known, or why nothing is.
        parameters: those that the graph was compiled with, as long as they are there.
        coverage: the share of its flop that runs tuned, and what is left out.
        tuned_us: what its tuned regions take in a training step, forward and backward, by the times that were measured
            of their kernels.
        selective: what is done with regions of which a selective checkpoint keeps some calls only.
        heads: a sentence about each loss that is computed with its head.
    """

    regions: Mapping[str, int]
    tuned: frozenset[str]
    nodes: int
    reasons: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
    parameters: tuple["ref[Tensor]", ...] = field(default=(), repr=False, compare=False)
    coverage: Coverage = Coverage()
    tuned_us: float = 0.0
    selective: str = ""
    heads: tuple[str, ...] = ()

    def reads_any(self, parameters: Iterable[Tensor]) -> bool:
        """Say whether the graph was compiled with one of these parameters."""
        own = {id(parameter) for parameter in parameters}
        return any(id(found) in own for found in (each() for each in self.parameters) if found is not None)

    @property
    def tuned_places(self) -> int:
        return sum(count for name, count in self.regions.items() if name in self.tuned)

    @property
    def headline(self) -> str:
        """Count of regions that run tuned, and their share of the flop."""
        places = sum(self.regions.values())
        if not places:
            return f"none of {self.nodes} calls make a region that can be tuned{': ' if self.note else ''}{self.note}"
        share = percent(self.coverage.tuned_flop, self.coverage.flop)
        of_flop = f": {share} of the flop of the model's forward" if self.coverage.flop else ""
        said = f"{self.tuned_places} of {places} regions run tuned ({len(self.tuned)} of {len(self.regions)} kinds)"
        return f"{said}{of_flop}; for the others, {self.note}" if self.note else said + of_flop

    def __str__(self) -> str:
        of_step = [f"their kernels were measured to take {self.tuned_us:,.0f} us of a training step"]
        lines = [
            *(of_step if self.tuned_us else []),
            *filter(None, [self.selective]),
            *self.heads,
            *self.coverage.lines,
        ]
        return "\n".join([self.headline, *(f"  {line}" for line in lines)])
