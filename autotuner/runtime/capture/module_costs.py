"""Costs of a tuned region by module: time and kept bytes of its plan, where its operators are of one module."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import takewhile

from autotuner.ir.autodiff import derived_from
from autotuner.ir.matching import same_tensors
from autotuner.plan.step import tensor_of
from autotuner.runtime.capture.region_model import Region
from autotuner.runtime.coverage import PlannedPart
from autotuner.runtime.region_plan import RegionPlan


def costs_by_module(region: Region, plan: RegionPlan, modules: Mapping[str, Collection[str]]) -> list[PlannedPart]:
    """Return time and kept bytes of a region's plan, each for the module that holds all operators concerned.

    A kernel of backward counts for the modules of the forward operators that it is derived from. What is of no single
    operator, as a conversion, a sum of gradients or the copy of an input, counts for the region's module.

    Args:
        plan: of the region, whose configuration may name tensors in another way.
        modules: paths of the modules that make the calls of an operator, by the first tensor that it makes.
    """
    whole = {path for paths in modules.values() for path in paths}
    same = same_tensors(region.model.graph(), plan.configuration.model.graph()) or {}
    own = {same[tensor]: paths for tensor, paths in modules.items() if tensor in same}

    def module(tensors: Collection[str]) -> str:
        known = [own.get(tensor, ()) for tensor in tensors]
        return common_module({path for paths in known for path in paths} if known and all(known) else whole)

    return [PlannedPart(module(tensors), us, kept_bytes) for tensors, us, kept_bytes in _costs(plan)]


def common_module(paths: Iterable[str]) -> str:
    """Return the path of the innermost module that holds several; "" for the model itself."""
    names = zip(*(path.split(".") for path in paths), strict=False)  # the shortest path ends it
    return ".".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, names))


def _costs(plan: RegionPlan) -> Iterator[tuple[set[str], float, int]]:
    """Yield times of kernels and bytes that are kept, each with the first tensors of the forward operators concerned.

    Where one of these is not known, there are none.
    """
    forward, steps = plan.configuration.model.graph(), plan.configuration.steps
    first = {operator.name: operator.outputs[0] for operator in forward.operators}
    origins = derived_from(forward) if any(step.phase == "backward" for step in steps) else {}
    for step in steps:
        names = [origins.get(name, name) for name in (*step.operators, *step.recomputed)]
        yield ({first[name] for name in names} if all(name in first for name in names) else set()), step.predicted_us, 0
    made_by = {tensor: operator.outputs[0] for operator in forward.operators for tensor in operator.outputs}
    for number in (*plan.memory.saved, *plan.memory.held_outputs):
        buffer = plan.memory.buffers[number]
        tensors = {tensor_of(name) for name, _ in buffer.offsets}
        is_known = all(tensor in made_by for tensor in tensors)
        yield ({made_by[tensor] for tensor in tensors} if is_known else set()), 0.0, buffer.size_bytes
