"""Overlap of kernel steps: branches beside the other steps, and those that are worth trying.

Two steps can overlap if neither needs the other's results. A step has slack if the longest chain of steps through it
takes less than the longest chain of its phase: it may run beside that one. Matrix products fill a device, and other
steps mostly wait for memory, so the two kinds have a branch each.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from autotuner.ir.graph import Graph
from autotuner.ir.kinds import kind_of
from autotuner.plan.configuration import Configuration
from autotuner.plan.memory_planner import make_plan, memory
from autotuner.plan.parts import Overlap
from autotuner.plan.step import Branches, Step, sources_of

LEAST_SLACK_SHARE = 1e-3
"""Of the longest chain: less is rounding."""


def slack_us(steps: Sequence[Step]) -> list[float]:
    """Return by how much each step could take longer, if steps that do not need each other ran at the same time."""
    sources = sources_of(steps)
    before, behind = [0.0] * len(steps), [0.0] * len(steps)
    for number, step in enumerate(steps):
        of_phase = [source for source in sources[number] if steps[source].phase == step.phase]
        before[number] = max((before[source] + steps[source].predicted_us for source in of_phase), default=0.0)
    for number in reversed(range(len(steps))):
        for source in sources[number]:
            if steps[source].phase == steps[number].phase:
                behind[source] = max(behind[source], steps[number].predicted_us + behind[number])
    through = [before[number] + step.predicted_us + behind[number] for number, step in enumerate(steps)]
    longest = {step.phase: 0.0 for step in steps}
    for step, us in zip(steps, through, strict=True):
        longest[step.phase] = max(longest[step.phase], us)
    found = [longest[step.phase] - us for step, us in zip(steps, through, strict=True)]
    return [us if us > LEAST_SLACK_SHARE * longest[step.phase] else 0.0 for us, step in zip(found, steps, strict=True)]


def proposed_branches(configuration: Configuration) -> Branches:
    """Return branches that are worth trying: of steps without matrix products, and of those with; () for none."""
    graph, steps = configuration.graph(), configuration.steps
    free = [number for number, us in enumerate(slack_us(steps)) if us > 0]
    branches = (
        tuple(number for number in free if _multiplies(graph, steps[number]) is multiplies)
        for multiplies in (False, True)
    )
    return tuple(branch for branch in branches if branch)


def _multiplies(graph: Graph, step: Step) -> bool:
    return any(kind_of(o).operator_class == "contraction" for o in graph.operators if o.name in step.operators)


def with_overlap(configuration: Configuration, overlap: Overlap | None) -> Configuration:
    """Return a configuration that has no overlap yet with one, and with the memory that it needs then.

    Of each stream, one kernel runs at a time. Any may be the one that needs the largest workspace.
    """
    changed, planned = replace(configuration, overlap=overlap), configuration.memory
    if planned is None or overlap is None:
        return changed
    before, after = (memory(make_plan(each)).peak_bytes for each in (configuration, changed))
    workspaces = (planned.peak_bytes - before) * (1 + len(overlap.branches))
    return replace(changed, memory=replace(planned, peak_bytes=after + workspaces))


def exceeds_budget(configuration: Configuration) -> bool:
    """Say whether a configuration needs more memory than its budget."""
    planned = configuration.memory
    return planned is not None and planned.budget_bytes is not None and planned.peak_bytes > planned.budget_bytes


Comparing = Callable[[Branches, Branches], Overlap]
"""Measure a plan with some branches against the same with others: what the second ones gain, with their branches."""


def chosen_overlap(proposed: Branches, compared: Comparing) -> Overlap | None:
    """Return the branches that were seen to make a plan faster, with what they gain in all; None where none do.

    A change is kept if the lower end of its gain's interval is above zero. Each branch is tried as a whole first; then
    its steps one by one, which are left out where the whole helps, and put in where it does not.
    """

    def better(before: Branches, after: Branches) -> bool:
        return compared(tuple(filter(None, before)), tuple(filter(None, after))).low_us > 0

    best: Branches = ((),) * len(proposed)
    for place, branch in enumerate(proposed):
        whole = (*best[:place], branch, *best[place + 1 :])
        if better(best, whole):
            best = whole
        for number in branch:
            if best[place] == (number,):
                continue
            toggled = tuple(sorted({number}.symmetric_difference(best[place])))
            changed = (*best[:place], toggled, *best[place + 1 :])
            if better(best, changed):
                best = changed
    found = tuple(filter(None, best))
    overlap = compared((), found) if found else None
    return overlap if overlap is not None and overlap.low_us > 0 else None
