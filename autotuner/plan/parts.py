"""Parts of a configuration: fused kernels, the certificate, memory, what was timed end to end, and leaner plans."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from autotuner.plan.document import AtLeastOne, Count, Document, Flag, IntegerOrNumber, Number, Positive, Share, Us
from autotuner.plan.step import Branches, Step

LEAN_SHARE = 0.01
"""Of the fastest plan's time, that may be given for bytes which forward need not leave for backward."""
OF_FASTEST = ("fastest_us", "fastest_held_bytes", "held_bytes")
"""Statistics of a plan that was taken instead of the fastest: that one's time and held bytes, and its own bytes."""


@dataclass(frozen=True)
class Fusion(Document):
    """A set of operators that one kernel could compute: whether that was chosen, and what was measured.

    Args:
        operators: what it covers.
        kernel: the fastest measured for it, "" where none works.
        best_us: that kernel's time in its best forms, None where none works.
        instead_us: what the chosen steps take for the same operators; a step's time is shared evenly by its operators.
        chosen: whether a step of the configuration covers exactly this set.
        alone_us: its operators one by one, each at its fastest alone, under any forms; None where one has no time so.
    """

    operators: Annotated[tuple[str, ...], Field(min_length=2)]
    kernel: str
    best_us: Us | None
    instead_us: Us
    chosen: Flag
    alone_us: Us | None = None


@dataclass(frozen=True, kw_only=True)
class Certificate(Document):
    """Quality of the plan, in microseconds: its predicted total, a lower bound, and who solved it.

    `lower_bound_us` is proven: no plan takes less. `proven_gap` is how far the total lies above it, as a share, None
    where it is 0; `estimated_gap` is a second figure, from learned costs, None where nothing is estimated. `low_us` to
    `high_us` is what the total is if the steps' own intervals hold. `baseline_us` is the paper's strategy on the same
    costs, `default_us` every operator alone with every tensor as declared, each None where it has no plan.
    `default_is_marked` says that some of its times were taken while the device was busy or changed its speed.
    `noise_floor` is the relative difference that two identical calls showed in this environment, None if not measured.
    `statistics` is what solving took, by names that are the solver's own; of a plan that is not the fastest, because it
    leaves fewer bytes for backward, also what `OF_FASTEST` names.
    """

    solver: str
    predicted_us: Us
    lower_bound_us: Us
    proven_gap: Share | None
    low_us: Us
    high_us: Us
    estimated_gap: Share | None = None
    baseline_us: Us | None = None
    default_us: Us | None = None
    default_is_marked: Flag = False
    noise_floor: Share | None = None
    statistics: Mapping[str, IntegerOrNumber] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """Memory of a training step beside parameters and inputs, in bytes, as planned.

    Args:
        budget_bytes: what was asked for; None for no limit.
        held_bytes: what forward leaves for backward.
        peak_bytes: the most at any time, with what is handed out and the kernels' workspaces.
    """

    budget_bytes: Count | None
    held_bytes: Count
    peak_bytes: Count


@dataclass(frozen=True)
class Measured(Document):
    """The plan timed end to end, forward and backward, interleaved with its peers in one run: medians in microseconds.

    `overhead_us` is the plan's step with its kernels left out: copies of inputs and parameters, autograd, Python.
    `switching_us` is what its kernels take longer behind each other than behind themselves, as each is timed alone.
    `slowdown` is the step under load that lasts, over the same in short rounds, as kernels are timed: a device at its
    power limit lowers its clock. Both are of CUDA devices. `ratios` are peer over plan: above 1, the plan is faster.
    Peaks are what a step allocates at most beside parameters and inputs, in bytes; None where the allocator does not
    say.
    """

    plan_us: Positive
    overhead_us: Us
    peers_us: Mapping[str, Us]
    samples: AtLeastOne
    peak_bytes: Count | None = None
    peers_peak_bytes: Mapping[str, Count | None] = field(default_factory=dict)
    switching_us: Us = 0.0
    slowdown: Positive = 1.0

    def predicted_us(self, kernels_us: float) -> float:
        """Return what a step should take, given the time of its kernels; see `Configuration.kernels_us`."""
        return (kernels_us + self.overhead_us + self.switching_us) * self.slowdown

    def predicted_over_measured(self, kernels_us: float) -> float:
        """Return how far the prediction is from the step end to end, as a share of that."""
        return self.predicted_us(kernels_us) / self.plan_us - 1

    @property
    def ratios(self) -> dict[str, float]:
        return {name: peer / self.plan_us for name, peer in self.peers_us.items()}


@dataclass(frozen=True)
class Overlap:
    """Steps that run beside the others on a GPU, and the time that this saves: the whole plan measured both ways.

    Args:
        branches: steps by number. Each branch has a stream of its own.
        gain_us: less than with all steps on one stream, median of pairs that were taken in turn.
        low_us, high_us: its 95 % interval.
    """

    branches: Branches
    gain_us: Number
    low_us: Number
    high_us: Number


@dataclass(frozen=True)
class LeanerPlan(Document):
    """Another plan of the same graph, which takes longer and leaves fewer bytes for backward.

    Args:
        predicted_us: the sum of its steps' medians.
        held_bytes, peak_bytes: as of `Memory`.
    """

    steps: Annotated[tuple[Step, ...], Field(min_length=1)]
    predicted_us: Us
    held_bytes: Count
    peak_bytes: Count
