"""Survey of a model's regions over many batches: which shapes occur, and how often."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from autotuner.api.backend import capture, joined
from autotuner.api.knowledge import OfDatabase, device_type_of
from autotuner.api.layer_drop import draw_for_no_layer
from autotuner.errors import InputError
from autotuner.ir.cost import operator_flop
from autotuner.ir.models import Model
from autotuner.plan.configuration import Configuration
from autotuner.runtime.capture.left_out import Parts
from autotuner.runtime.coverage import Coverage, percent
from autotuner.runtime.devices import device_runtime
from autotuner.runtime.fallbacks import NO_GRAPH
from autotuner.runtime.host_randomness import HostRandomness
from autotuner.runtime.own_code import with_own_code
from autotuner.settings import Settings


@dataclass(frozen=True)
class RegionCount:
    """A region of one shape and mode, and how often it ran.

    Args:
        model: the region.
        runs: in all batches, each place of the model counted.
        flop: of one forward.
        known: its configuration, where the database has one.
    """

    model: Model
    runs: int
    flop: int
    known: Configuration | None = None


@dataclass(frozen=True)
class RegionReport:
    """The regions in a model's calls, the most work first; `str` gives a table.

    Args:
        regions: each shape and mode by itself.
        batches: how many there were.
        reasons: why other parts of the model cannot be tuned.
    """

    regions: tuple[RegionCount, ...]
    batches: int
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        total = sum(each.flop * each.runs for each in self.regions)
        lines = [f"{self.batches} batches, {len(self.regions)} regions that differ in kind, shape or mode"]
        for each in self.regions:
            sizes = " ".join(f"{axis}={extent}" for axis, extent in each.model.extents.items())
            share = each.flop * each.runs / total if total else 0.0
            known = "not tuned" if each.known is None else "tuned"
            lines.append(f"{share:6.1%} of their flop  {each.runs:6,} runs  {known:9}  {each.model.name} {sizes}")
        return "\n".join(lines)


@dataclass
class RegionCalls:
    """Regions in graphs of dynamo's, and how often each ran.

    Args:
        models: each region by its key.
        runs: how often it ran, by its key.
        batches: how many batches there were.
        notes: why nodes, or whole graphs, are in no region.
        coverage: of each graph, the flop of its regions, and what is left out and why.
    """

    models: dict[str, Model] = field(default_factory=dict)
    runs: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    notes: list[str] = field(default_factory=list)
    coverage: list[Coverage] = field(default_factory=list)

    @property
    def share(self) -> str:
        """The share of the flop that regions have, of one call of each graph."""
        found = Coverage.of_all(self.coverage)
        return percent(found.tuned_flop, found.flop)


def regions(
    model: nn.Module, batches: Iterable[Any], *, database: str | Path | None = None, device: str | None = None
) -> RegionReport:
    """Call a module with batches, and return which regions it has: their shapes, how often they run, which are tuned.

    Forward runs, in the mode that the module is in; buffers and generators are put back behind it. Nothing is measured.
    `autotuner.tune(model, batches=batches)` tunes them.

    Args:
        batches: each is what the module is called with: a mapping of keyword arguments, a tuple or list of positional
            ones, or a tensor. Tensors are moved to the module's device.
        database: where configurations are looked up, those that were tuned exact and without a budget; by default
            `AUTOTUNER_DATABASE`.
        device: device type; by default where the module's parameters are.
    """
    calls = region_calls(model, batches)
    models = sorted_by_work(calls)
    where = database if database is not None else Settings.from_environment().database_url
    known = OfDatabase(where).find(models.values(), device or device_type_of(model))
    counts = [
        RegionCount(each, calls.runs[key], flop_of(each), found)
        for (key, each), found in zip(models.items(), known, strict=True)
    ]
    return RegionReport(tuple(counts), calls.batches, tuple(dict.fromkeys(calls.notes)))


class _LeftOutError(Exception):
    """A gradient is asked for, and nothing is there for it."""


def _left_out(_: Any) -> Tensor:
    raise _LeftOutError


def region_calls(
    called: Callable[..., Any], batches: Iterable[Any], model: nn.Module | None = None
) -> RegionCalls:  # fmt: skip
    """Call a module or function with each batch, and return the regions in its graphs.

    Graphs keep nothing for backward, unless gradients are taken within a call.

    Args:
        model: whose buffers are put back behind it; by default the module that is called.
    """
    keeps = False
    calls = RegionCalls()

    def look(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        joined(module)
        captured = capture(module)
        regions = () if isinstance(captured, str) else captured.regions
        calls.coverage.append(Parts(module.graph, captured).coverage(regions, ""))
        counts = Counter(region.key for region in regions)
        calls.models.update({region.key: region.model for region in regions})
        calls.notes.extend((captured,) if isinstance(captured, str) else captured.reasons)

        def run(*arguments: Any) -> Any:
            calls.runs.update(counts)
            with nullcontext() if keeps else saved_tensors_hooks(lambda _: None, _left_out):
                return module.forward(*arguments)

        return run

    def call(*arguments: Any, **named: Any) -> Any:
        return called(*arguments, **named)

    compiled = torch.compile(with_own_code(call), backend=look, dynamic=False)
    owner = called if model is None and isinstance(called, nn.Module) else model
    draw_for_no_layer(owner)
    limit = max(torch._dynamo.config.recompile_limit, 256)
    with torch._dynamo.config.patch(recompile_limit=limit), _as_before(owner):
        for batch in batches:
            calls.batches += 1
            positional, named = _arguments(batch, called)
            before = Counter(calls.runs)
            try:
                compiled(*positional, **named)
            except _LeftOutError:
                keeps, calls.runs = True, before
                compiled(*positional, **named)
    return calls


@contextmanager
def _as_before(model: nn.Module | None) -> Iterator[None]:
    """Put back generators and a model's buffers, such as running means, that its calls have moved on."""
    first = None if model is None else next(model.parameters(), None)
    runtime = device_runtime(torch.device("cpu") if first is None or first.is_meta else first.device)
    kept = [] if model is None else [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules() for name, buffer in module._buffers.items()
        if buffer is not None and not nn.parameter.is_lazy(buffer) and not buffer.is_inference()
    ]  # fmt: skip
    host = HostRandomness()
    with runtime.forked_random():
        try:
            yield
        finally:
            host.restore()
            for module, name, buffer, before in kept:
                module._buffers[name] = buffer
                buffer.data.copy_(before)  # which no graph of the caller's takes for a change


def _arguments(batch: Any, called: Callable[..., Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's positional and keyword arguments, all tensors on a module's device."""
    positional = () if isinstance(batch, Mapping) else (batch,) if isinstance(batch, Tensor) else tuple(batch)
    named = dict(batch) if isinstance(batch, Mapping) else {}
    parameter = next(called.parameters(), None) if isinstance(called, nn.Module) else None
    if parameter is None:
        return positional, named
    moved: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
        Tensor, lambda tensor: tensor.to(parameter.device), (positional, named)
    )
    return moved


def found_in(calls: RegionCalls, called: Callable[..., Any]) -> list[Model]:
    """Return the regions of a module's calls, the most work first.

    Raises:
        InputError: there are none; the message says why.
    """
    if not calls.models:
        name = type(called).__name__ if isinstance(called, nn.Module) else "function"
        told = Coverage.of_all(calls.coverage).lines
        nothing = "nothing in it repeats, and it has no attention" if calls.coverage else NO_GRAPH
        why = "\n".join([f"; {told[0]}", *told[1:]]) if told else f": {next(iter(calls.notes), nothing)}"
        raise InputError(f"no region of this {name} can be tuned{why}")
    return list(sorted_by_work(calls).values())


def sorted_by_work(calls: RegionCalls) -> dict[str, Model]:
    """Return regions by key, those that compute most in all calls first."""
    work = {key: calls.runs[key] * flop_of(model) for key, model in calls.models.items()}
    return {key: calls.models[key] for key in sorted(work, key=lambda key: -work[key])}


def flop_of(model: Model) -> int:
    """Return the flop of a region's forward."""
    graph = model.graph()
    return sum(operator_flop(graph, operator) for operator in graph.operators)
