"""Roofline of a device: from it follows the least that a call can take, before it is measured.

Its ceilings are measured once per environment, under its measuring policy (`autotuner.measure.microbenchmarks`): the
least time of any call, and ladders of the least time for so many bytes moved and for a product of so many flop. From
these follows an optimistic cost of any call. It is admissible, never above what measuring finds, as long as

- a call reads and writes its whole boundary, and takes every multiplication of its products (half of them under a
  causal mask);
- nothing moves more bytes in less time than the fastest of plain copies, sums, fills and additions of fewer bytes does,
  nor multiplies more in less time than the fastest of dense products of less flop;
- the device is not faster later than when its ceilings were measured.

A kernel that skips what a mask hides breaks the first, one with a better product than the two that are tried (torch's
and, on a processor, this package's own) the second, a busy machine the third. So a measured call that is faster than
its optimistic cost lowers the ladder where it stands: see `Roofline.lowered`.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf, prod

from autotuner.ir.kinds import ELEMENT_BYTES
from autotuner.ir.records import Call, Node, Subgraph
from autotuner.kernels.geometry import band_of, letter_extents

CEILING = "ceiling_us"
CALL = f"{CEILING} call"
BYTES = "bytes"
ITEM_BYTES: Mapping[str, int] = {**ELEMENT_BYTES, "bool": 1, "int8": 1, "uint8": 1, "int32": 4, "int64": 8}
CAUSAL_SHARE = 0.5
"""Of a product under a causal mask, as much as is above the diagonal may be left out."""


@dataclass(frozen=True)
class Ladder:
    """Least times by amount of work.

    Args:
        rungs: (amount, least microseconds measured for it), amounts above 0 and rising.
    """

    rungs: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        amounts = [amount for amount, _ in self.rungs]
        if amounts != sorted(set(amounts)) or any(amount <= 0 or us <= 0 for amount, us in self.rungs):
            raise ValueError(f"the rungs {self.rungs} are no ladder: give amounts that rise, and times, all above 0")

    def least_us(self, amount: float) -> float:
        """Return what no work of this amount takes less than; 0 without rungs.

        The rung at or below the amount and all above it count: so much takes no less than the least of their times, and
        is done at no more than the best of their rates.
        """
        if not self.rungs or amount <= 0:
            return 0.0
        place = bisect_right(self._amounts, amount) - 1
        least, rate = self._envelope[max(place, 0)]
        return max(least if place >= 0 else 0.0, amount / rate)

    def lowered(self, found: Iterable[tuple[float, float]]) -> "Ladder":
        """Return the ladder with rungs for those of some (amount, microseconds) that are below it."""
        rungs = dict(self.rungs)
        for amount, us in found:
            if us < self.least_us(amount):
                rungs[amount] = min(us, rungs.get(amount, us))
        return Ladder(tuple(sorted(rungs.items())))

    @cached_property
    def _amounts(self) -> list[float]:
        return [amount for amount, _ in self.rungs]

    @cached_property
    def _envelope(self) -> list[tuple[float, float]]:
        """For each rung, the least time and the best rate of it and all above."""
        found: list[tuple[float, float]] = []
        least, rate = inf, 0.0
        for amount, us in reversed(self.rungs):
            least, rate = min(least, us), max(rate, amount / us)
            found.append((least, rate))
        return found[::-1]


@dataclass(frozen=True)
class Roofline:
    """Best performance of a device under one measuring policy; times in microseconds.

    Args:
        call_us: the least time of any call: what starting and timing it take.
        moved: by bytes read and written, operands as the policy rotates them.
        products: by flop, for each element type.
    """

    call_us: float = 0.0
    moved: Ladder = Ladder()
    products: Mapping[str, Ladder] = field(default_factory=dict)

    def optimistic_us(self, work: "Work") -> float:
        """Return what a call takes at least: to be started, to move its boundary, and for its products."""
        products = (self.products[dtype].least_us(flop) for dtype, flop in work.flop.items() if dtype in self.products)
        return max(self.call_us, self.moved.least_us(work.moved_bytes), *products, 0.0)

    def lowered(self, measured: Iterable[tuple["Work", float]]) -> "Roofline":
        """Return ceilings which say of none of some calls that it takes more than it was measured to take."""
        found = list(measured)
        return Roofline(
            min(self.call_us, *(us for _, us in found), inf),
            self.moved.lowered((work.moved_bytes, us) for work, us in found),
            {
                dtype: ladder.lowered((work.flop[dtype], us) for work, us in found if dtype in work.flop)
                for dtype, ladder in self.products.items()
            },
        )

    def least(self, other: "Roofline") -> "Roofline":
        """Return the least of these and others at each rung: what was measured at another moment, say."""
        mine, theirs = self.to_facts(), other.to_facts()
        return Roofline.from_facts(
            theirs | mine | {name: min(mine[name], theirs[name]) for name in mine.keys() & theirs}
        )

    def lacking(self, dtypes: Iterable[str]) -> list[str]:
        """Return those of some element types whose products were not measured."""
        return sorted(set(dtypes) - self.products.keys())

    def with_products(self, other: "Roofline") -> "Roofline":
        """Return these with products of more element types, and what else these lack, from others."""
        return Roofline(
            self.call_us or other.call_us,
            self.moved if self.moved.rungs else other.moved,
            {**other.products, **self.products},
        )

    def to_facts(self) -> dict[str, float]:
        """Return them as facts of an environment: "ceiling_us bytes 4096" is a time."""
        facts = {CALL: self.call_us} if self.call_us else {}
        for name, ladder in {BYTES: self.moved, **self.products}.items():
            facts |= {f"{CEILING} {name} {amount:.0f}": us for amount, us in ladder.rungs}
        return facts

    @classmethod
    def from_facts(cls, facts: Mapping[str, float]) -> "Roofline":
        """Read what `to_facts` wrote among other facts; what is not there is empty, and bounds nothing.

        Ladders of another name, such as those of the host's link in earlier databases, are left out.
        """
        ladders: dict[str, dict[float, float]] = {}
        for name, us in facts.items():
            match name.split():
                case [start, kind, amount] if start == CEILING and kind in (BYTES, *ITEM_BYTES):
                    ladders.setdefault(kind, {})[float(amount)] = us
        read = {kind: Ladder(tuple(sorted(rungs.items()))) for kind, rungs in ladders.items()}
        return cls(facts.get(CALL, 0.0), read.pop(BYTES, Ladder()), read)


NO_ROOFLINE = Roofline()
"""Nothing is known: every call may cost nothing."""


def boundary_bytes(call: Call) -> float:
    """Return the bytes that a call reads and writes at least: each tensor of its boundary once, as its form stores it.

    An element type that is not known here counts nothing.
    """
    total = 0.0
    for number, form in zip(call.subgraph.boundary, call.candidate.parsed_forms(), strict=True):
        if not form.is_absent:
            tensor = call.subgraph.tensors[number]
            lies = form.stored(tensor.dtype, tensor.axes, tensor.extents)
            total += prod(lies.extents) * ITEM_BYTES.get(lies.dtype, 0)
    return total


def product_flop(call: Call) -> dict[str, float]:
    """Return the flop of a call's contractions, by the element type that they read; operators of other kinds are free.

    What they need beside, no unit of a device does faster than it multiplies matrices, or at the same time.
    """
    share = min(map(partial(_share_shown, call.subgraph), call.subgraph.nodes))
    total: dict[str, float] = {}
    for node in call.subgraph.nodes:
        if node.kind == "contraction":
            flop = 2 * prod(letter_extents(call.subgraph, node).values()) * share
            dtype = call.subgraph.tensors[node.inputs[0]].dtype
            total[dtype] = total.get(dtype, 0.0) + flop
    return total


def _share_shown(subgraph: Subgraph, node: Node) -> float:
    """Return the share of scores that a causal mask or a window leaves, 1 of another operator.

    >>> from autotuner.ir.records import TensorType
    >>> scores = TensorType((1, 1, 4, 4), "float32")
    >>> near = (("query_axis", "q"), ("key_axis", "k"), ("before", 1), ("after", 0))
    >>> node = Node("window_mask", "bnqk->bnqk", (0,), (1,), near)
    >>> _share_shown(Subgraph((node,), (scores, scores), (0,), (1,)), node)
    0.4375
    """
    if node.kind == "causal_mask":
        return CAUSAL_SHARE
    window = band_of(node)
    if window is None:
        return 1.0
    places = letter_extents(subgraph, node)[str(dict(node.attributes)["key_axis"])]
    hidden = sum(left * (left + 1) // 2 for left in (max(0, places - 1 - each) for each in window))
    return 1 - hidden / places**2


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of a call: bytes that it moves, and flop of its products by element type."""

    moved_bytes: float
    flop: Mapping[str, float]


def work_of(call: Call) -> Work:
    return Work(boundary_bytes(call), product_flop(call))
