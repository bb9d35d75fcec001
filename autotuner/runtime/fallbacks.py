"""Fallbacks: reasons why a configuration does not cover a call, counts of such calls, and their summary."""

import atexit
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from autotuner.errors import TunedWarning, stacklevel
from autotuner.runtime.coverage import CompiledGraph, Coverage
from autotuner.runtime.padding.report import PaddingReport
from autotuner.runtime.step_needs import StepNeeds
from autotuner.runtime.step_times import StepShare

Shape = tuple[int, ...]
Key = tuple[str, str, Shape]
"""A layer's class, the key of a reason, and the shape of the input."""

SHAPES = 64
"""Of calls that fell back, so many shapes are told apart; all further ones are counted as one."""
TOLD_FROM = 0.05
"""Share of a process's calls above which fallbacks are reported when it ends."""
LINES = 8
NO_GRAPH = 'torch made no graph of it, and runs it as it is: TORCH_LOGS="graph_breaks" tells where it stopped'
NOTHING = (
    "nothing ran tuned: no tuned layer was called, and no graph was compiled. Call what autotuner.apply(layer, ...) or "
    f'torch.compile(model, backend="autotuner") returned; if that was called, {NO_GRAPH}'
)

_REMEDIES = {
    "region": "tune it with inputs like these, and give apply all: apply(module, [*one, *other])",
    "shape": "tune for this shape as well, and give apply a list: apply(layer, [one, other])",
    "mask": 'tune with options={"attention_mask": True}, and give apply both: apply(layer, [plain, masked])',
    "padding": "leave examples that are all padding out of the batch",
    "settings": 'for evaluation tune with mode="eval", and give apply both: apply(layer, [train, eval])',
    "dtype": "call it with inputs of the configuration's dtype on its device, or tune for these",
    "autocast": "convert the layer to the dtype that autocast computes in and call it outside of autocast",
    "hooks": "remove the hooks of its submodules, or restore this layer",
    "forward": "leave the forward of its submodules as it is, or restore this layer",
    "parameters": "keep plain parameters of the shapes and the dtype that it was tuned for, or restore this layer",
    "parts": "keep its submodules as they were, tune the changed layer anew, or restore it",
}


@dataclass(frozen=True)
class Reason:
    """The reason for which a configuration does not cover a call: a key to count by, and a sentence."""

    key: str
    sentence: str


@dataclass(frozen=True)
class Summary:
    """Counts of the calls of tuned modules; `str` gives sentences.

    Args:
        calls: those that ran a configuration.
        fallbacks: those that ran the original, by layer class, reason and shape of the input.
        graphs: those that were compiled, each with its regions.
        steps: of each function that `training_step` made and that has been called, the time of a step.
        paddings: of each of them that was called with several shapes, the calls that were padded.
        needs: of steps under a memory budget of `optimize`, a value for each shape and mode.
    """

    calls: int
    fallbacks: Counter[Key]
    graphs: tuple[CompiledGraph, ...] = ()
    steps: tuple[StepShare, ...] = ()
    paddings: tuple[PaddingReport, ...] = ()
    needs: tuple[StepNeeds, ...] = ()

    @property
    def coverage(self) -> Coverage:
        """The share of the flop of all compiled graphs that runs tuned, and what is left out."""
        return Coverage.of_all(graph.coverage for graph in self.graphs)

    def scalars(self) -> dict[str, float]:
        """Return figures by name, for a log of a training: TensorBoard's `add_scalar`, or `mlflow.log_metrics`.

        Shares are from 0 to 1, times in microseconds. Of several steps, each has a number.
        """
        found = {}
        if self.calls or self.fallbacks:
            found["autotuner/calls_tuned_share"] = self.tuned_share
        if self.graphs:
            found["autotuner/flop_tuned_share"] = self.coverage.tuned_share
            found["autotuner/regions"] = sum(sum(graph.regions.values()) for graph in self.graphs)
            found["autotuner/regions_tuned"] = sum(graph.tuned_places for graph in self.graphs)
        for number, step in enumerate(self.steps, 1):
            own = f"autotuner/step_{number}" if len(self.steps) > 1 else "autotuner/step"
            found |= {f"{own}_us": step.step_us, f"{own}_tuned_us": step.tuned_us}
        if self.paddings:
            calls = sum(padding.calls for padding in self.paddings)
            found["autotuner/padded_share"] = sum(padding.padded for padding in self.paddings) / calls if calls else 0.0
        return found

    def html(self) -> str:
        """Return a page: the modules of the compiled models as a tree, what share of each runs tuned, and why not all.

        It needs no other file, and holds no script. In a notebook, a summary is shown so.
        """
        from autotuner.runtime.summary_page import page

        return page(self.coverage, str(self))

    def _repr_html_(self) -> str:
        from autotuner.runtime.summary_page import fragment

        return fragment(self.coverage, str(self))

    @property
    def tuned_share(self) -> float:
        """The share of calls that ran a configuration; 1 where there was no call."""
        total = self.calls + self.fallbacks.total()
        return self.calls / total if total else 1.0

    def __str__(self) -> str:
        total = self.calls + self.fallbacks.total()
        told = [f"compiled graph {number}: {graph}" for number, graph in enumerate(self.graphs, 1)]
        told += [str(step) for step in self.steps if step.tuned_us]
        told += [f"of a training step, {padding}" for padding in self.paddings]
        told += [str(needs) for needs in self.needs]
        if not total and told:
            return "\n".join(told)
        if not total:
            return NOTHING
        lines = [f"{self.tuned_share:.0%} of {total:,} calls of tuned layers ran a configuration"]
        rows = self.fallbacks.most_common()
        for (name, reason, shape), count in rows[:LINES]:
            where = f" with an input of shape {shape}" if shape else ""
            remedy = _REMEDIES.get(reason)
            advice = f"; to run it tuned, {remedy}" if remedy else ""
            lines.append(f"{count:,} ran the original {name}{where} (reason: {reason}){advice}")
        if len(rows) > LINES:
            rest = sum(count for _, count in rows[LINES:])
            lines.append(f"{rest:,} more, of {len(rows) - LINES} other reasons and shapes")
        return "\n".join(lines + told)


@dataclass
class Tally:
    """Calls that ran a configuration, and those that fell back to the original.

    Args:
        region_us: of all calls of tuned regions in compiled models, by the measured times of their kernels, forward and
            backward.
    """

    calls: int = 0
    region_us: float = 0.0
    fallbacks: Counter[Key] = field(default_factory=Counter)

    def summary(self) -> Summary:
        return Summary(self.calls, Counter(self.fallbacks))


TALLY = Tally()
"""Of all tuned modules of this process."""


def count_fallback(counter: Counter[Key], key: Key) -> None:
    """Count a call by layer class, reason and shape; of many shapes, further ones as one without a shape."""
    name, reason, _ = key
    counter[key if key in counter or len(counter) < SHAPES else (name, reason, ())] += 1


def warn(message: str) -> None:
    """Warn, at the line outside of torch and this package that led here."""
    warnings.warn(message, TunedWarning, stacklevel=stacklevel())


@atexit.register
def tell() -> None:
    """Warn where a notable share of this process's calls fell back; called when it ends."""
    found = TALLY.summary()
    if found.tuned_share < 1 - TOLD_FROM:
        with suppress(TunedWarning):  # where warnings are errors, there is nobody left to catch it
            warnings.warn(f"autotuner: {found}", TunedWarning, stacklevel=1)
