"""The backend of `torch.compile`: known parts of a model run tuned, and another compiler gets the rest."""

import logging
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing

from autotuner.api.knowledge import Knowledge, OfConfigurations, OfDatabase, OfService
from autotuner.api.options import checked
from autotuner.api.shapes import ShapeDispatch, UntunedError, symbolic_places
from autotuner.api.telling import Say, teller_of_backend
from autotuner.errors import AutotunerError, ConfigurationError
from autotuner.ir.device import CPU
from autotuner.ir.kinds import draws
from autotuner.ir.numerics import CLASSES, Numerics, allowed_classes
from autotuner.plan.configuration import Configuration
from autotuner.plan.phrases import some
from autotuner.runtime.bound_parameters import lying_in
from autotuner.runtime.capture import Call, CapturedModule, Region
from autotuner.runtime.capture.axes import UnknownError
from autotuner.runtime.capture.checkpointed import repeat_as_drawn, with_checkpoints
from autotuner.runtime.capture.heads import Head
from autotuner.runtime.capture.joined_heads import join_heads
from autotuner.runtime.capture.left_out import Parts
from autotuner.runtime.coverage import CompiledGraph
from autotuner.runtime.devices.compiled_draws import note_generators
from autotuner.runtime.early_gradients import note_readers
from autotuner.runtime.graphs import Switch
from autotuner.runtime.joined_parameters import join_parameters
from autotuner.runtime.loop_budget import loop_budget
from autotuner.runtime.region import TunedRegion
from autotuner.runtime.region_choice import RegionChoice
from autotuner.runtime.region_operator import RegionResults
from autotuner.runtime.region_plan import RegionPlan, RegionPorts
from autotuner.settings import Settings, parsed_bytes

if TYPE_CHECKING:
    pass

log = logging.getLogger("autotuner.backend")

CUT_BY_DDP = (
    "DistributedDataParallel has its graph cut at its gradient buckets, and layers with it: "
    "torch._dynamo.config.optimize_ddp = False keeps them whole"
)

COMPILED: list[CompiledGraph] = []
"""The graphs that this process has compiled, in order."""


def compile_graph(
    module: fx.GraphModule,
    example_inputs: Sequence[Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of dynamo's.

    Args:
        module: the graph.
        example_inputs: tensors like those that it will be called with.
        mode: of Inductor, as torch.compile has them.
        options: "database", path or URL, "server", URL of a service or a client, or "configurations", values or paths
            of files: where configurations are known (by default `AUTOTUNER_SERVER` where it is set, or else
            `AUTOTUNER_DATABASE`); "compiler" of the rest: "inductor" (the default), "aot_eager" or "eager"; "graphs":
            whether tuned regions become CUDA graphs (true); "capture": "step" where the caller captures whole steps:
            regions make no graphs of their own then, read their inputs in place, and parameters that one of them reads
            as one are moved together; "budget": whether the caller's steps have a memory budget, which decides how
            regions run; "memory_budget": what a training step of the caller's loop may need, in bytes or as in "16GiB",
            see `optimize`; "budget_bytes": what plans of regions were tuned with, such as 2**30 or "1GiB" (none, for
            those that were tuned without a budget); "inductor": Inductor's own options; "numerics": the class that
            plans may be of, "exact" (the default), "8-bit" or "fp8", as of a tuning; "quiet": whether nothing is
            printed while kernels are built and the rest is compiled (false, or `AUTOTUNER_QUIET`).

    Raises:
        InputError: an option that is unknown or not valid.
    """
    given = dict(options or {})
    checked(given)
    name = str(given.get("compiler", "inductor"))
    compiler = compiler_of(name, mode, given.get("inductor"))
    say = teller_of_backend(bool(given.get("quiet", False)))
    knowledge = _knowledge(given)
    graphs = bool(given.get("graphs", True)) and given.get("capture") is None
    in_place, loop_bytes = given.get("capture") == "step", parsed_bytes(given.get("memory_budget"), "memory_budget")
    budget = bool(given.get("budget", False)) or loop_bytes is not None
    numerics: Numerics = given.get("numerics", "exact")
    eager = name == "eager"

    def of_one_shape(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        before = len(COMPILED)
        known = rewrite(
            graph, inputs, knowledge, graphs=graphs, in_place=in_place, eager=eager, say=say, budget=budget,
            numerics=numerics,
        )  # fmt: skip
        if len(known) <= len(regions):
            del COMPILED[before:]  # the graph with symbols runs for this shape, and is listed
            raise UntunedError
        return _within(loop_bytes, _holding(known, compiler(graph, inputs)), inputs)

    places = symbolic_places(module.graph)
    by_shape = ShapeDispatch(module, places, of_one_shape) if places else None
    note = "sizes are symbols in it; a shape that is known has a graph of its own" if places else ""
    regions = rewrite(
        module, example_inputs, knowledge, graphs=graphs, in_place=in_place, eager=eager, say=say, note=note,
        budget=budget, numerics=numerics,
    )  # fmt: skip
    if regions and name == "inductor" and say is not None:
        say("compiling the rest of the model with inductor, once for this shape; this may take minutes")
    compiled: Callable[..., Any] = compiler(module, example_inputs)
    if regions:
        compiled = _holding(regions, compiled)
    compiled = _within(loop_bytes, compiled, example_inputs)
    if by_shape is None:
        return compiled
    return by_shape.beside(compiled)


def _within(budget_bytes: int | None, compiled: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return compiled code that runs within a budget of its caller's loop, where there is one."""
    device = next((each.device for each in inputs if isinstance(each, Tensor)), None)
    if budget_bytes is None or device is None:
        return compiled
    return loop_budget(budget_bytes, device).runs(compiled, [each for each in inputs if isinstance(each, nn.Parameter)])


def _holding(regions: list[TunedRegion | RegionChoice], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return compiled code that holds its regions: it knows them by number."""

    def run(*arguments: Any) -> Any:
        return compiled(*arguments)

    run.regions = regions  # type: ignore[attr-defined]
    return run


def rewrite(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    knowledge: Knowledge,
    *,
    graphs: bool = True,
    in_place: bool = False,
    eager: bool = False,
    say: Say | None = None,
    note: str = "",
    budget: bool = False,
    numerics: Numerics = "exact",
) -> list[TunedRegion | RegionChoice]:
    """Put calls of tuned regions into a graph, for those that are known, and note what was done in `COMPILED`.

    Args:
        eager: whether the graph runs as it is: gradients of its regions can be differentiated again then.
        note: goes before what is said of regions that are not known.
        budget: whether regions get a choice of ways to run, for a step's budget to decide.
        numerics: the class of what plans may save for backward; those that save otherwise are left out.
    """
    heads = tuple(map(str, joined(module)))
    captured = capture(module)
    parts = Parts(module.graph, captured)
    held = _held(example_inputs)
    if isinstance(captured, str):
        calls_in_graph = sum(node.op.startswith("call") for node in module.graph.nodes)
        coverage = parts.coverage((), captured)
        _note(CompiledGraph({}, frozenset(), calls_in_graph, note=captured, parameters=held, coverage=coverage,
                            heads=heads))  # fmt: skip
        return []
    kinds = {region.key: region for region in captured.regions}
    known: dict[str, Configuration] = {}
    notes = [note] if note else []
    device_type = _device_type(example_inputs)
    try:
        found = knowledge.find([region.model for region in kinds.values()], device_type)
        known = {key: each for key, each in zip(kinds, found, strict=True) if each is not None}
        missing = [region.model for key, region in kinds.items() if key not in known]
        if missing:
            notes.append(knowledge.want(missing, device_type))
    except AutotunerError as error:
        notes.append(str(error))
    if len(known) < max(1, len(kinds)) and _is_cut_by_ddp():
        notes.append(CUT_BY_DDP)
    made: dict[Region, TunedRegion | RegionChoice] = {}
    calls: dict[Region, Call] = {}
    parameters: dict[Region, Sequence[fx.Node]] = {}
    for number, region in enumerate(captured.regions, 1):
        if region.key in known:
            ports = RegionPorts(region.inputs, region.parameters, region.outputs)
            if known[region.key].model.family != region.model.family:
                ports = ports.of(region.model.graph(), known[region.key].model.graph())
            label = f"region {number} of {len(captured.regions)} ({region.model.name})"
            try:
                switch = Switch(graphs and not budget)  # a budget turns it on where memory stays
                made_so = partial(
                    TunedRegion, ports=ports, graphs=switch, in_place=in_place or budget, repeats=eager, label=label,
                    # What a checkpoint makes again is in memory that others have had meanwhile.
                    follows=not captured.is_checkpointed(region), say=say,
                )  # fmt: skip
                first, *leaner = _allowed(known[region.key], numerics)
                fastest = made_so(first)
                tuned: TunedRegion | RegionChoice = fastest
                if budget:
                    tuned = RegionChoice([fastest, *_made_of(made_so, leaner)], switch if graphs else None)
            except ConfigurationError as error:  # its kernels keep to themselves what is handed out here
                notes.append(f"{label} is left out: {error}")
                continue
            made[region] = tuned
            calls[region] = _writer(tuned, region, eager, parameters)
    selective = captured.told_of(calls)
    placed: set[Region] = set(captured.replace(calls)) if calls else set()
    if calls:
        note_readers(module.graph, TunedRegion.operator)
        module.recompile()
    if in_place:
        _join(
            module.graph,
            example_inputs,
            [(each, parameters[region]) for region, each in made.items() if region in placed],
        )
    counts = Counter(region.model.name for region in captured.regions)
    running = frozenset(region.model.name for region in calls if region in placed)
    coverage = parts.coverage(placed, "not tuned", {region: made[region].plan for region in placed})
    tuned_us = sum(known[region.key].certificate.predicted_us for region in placed)
    reasons = dict(captured.reasons)
    told = "; ".join(each for each in notes if each)
    _note(CompiledGraph(counts, running, captured.nodes, reasons, told, held, coverage, tuned_us, selective, heads))
    return [tuned for region, tuned in made.items() if region in placed]


def _allowed(configuration: Configuration, numerics: Numerics) -> list[Configuration]:
    """Return the plans of a configuration whose storage formats and kernels are of classes that are allowed.

    Raises:
        ConfigurationError: those of the first one are not.
    """
    allowed = allowed_classes(numerics)
    for each, tensors in configuration.inexact.items():
        if each not in allowed:
            told = CLASSES[each].does.format(some(tensors))
            raise ConfigurationError(f'its plan {told}: numerics="{each}" allows that')
    return [plan for plan in configuration.plans if plan.inexact.keys() <= set(allowed)]


def _made_of(make: Callable[[Configuration], TunedRegion], plans: Sequence[Configuration]) -> Iterator[TunedRegion]:
    """Yield regions of plans, without those that keep to themselves what is handed out here."""
    for plan in plans:
        with suppress(ConfigurationError):
            yield make(plan)


def _note(compiled: CompiledGraph) -> None:
    COMPILED.append(compiled)
    log.info("%s", compiled.headline)


def joined(module: fx.GraphModule) -> list[Head]:
    """Make one operator of each head and its cross entropy, as `capture` of a graph expects it, and return these."""
    with _disable_saved_tensors_hooks_during_tracing():
        return join_heads(module)


def capture(module: fx.GraphModule) -> CapturedModule | str:
    """Return a graph with its regions, or why it has none.

    Nothing that is traced here is seen by the caller's hooks on saved tensors: `checkpoint` counts what it is given.
    """
    try:
        with _disable_saved_tensors_hooks_during_tracing():
            return CapturedModule(module)
    except UnknownError as error:
        return str(error)


def _join(
    graph: fx.Graph,
    example_inputs: Sequence[Any],
    regions: Sequence[tuple[TunedRegion | RegionChoice, Sequence[fx.Node]]],
) -> None:
    """Move parameters of the model to where the plans of regions read them without a copy, as far as may be.

    Args:
        regions: each with the nodes of its parameters.
    """
    given = dict(zip((node for node in graph.nodes if node.op == "placeholder"), example_inputs, strict=True))
    for tuned, nodes in regions:
        plan: RegionPlan = tuned.plan
        lying = lying_in(plan.memory, plan.ports.parameters)
        join_parameters(plan.memory, lying, [given.get(node) for node in nodes])


def _writer(
    tuned: TunedRegion | RegionChoice, region: Region, eager: bool, read: dict[Region, Sequence[fx.Node]]
) -> Call:
    def write(graph: fx.Graph, inputs: Sequence[fx.Node], parameters: Sequence[fx.Node]) -> list[fx.Node]:
        read[region] = tuple(parameters)
        inputs, parameters = _without_history(graph, tuned.plan.results, inputs, parameters)
        if eager:
            outputs = made = graph.call_function(tuned.call, (list(inputs), list(parameters)))
        else:
            made = graph.call_function(tuned.operator, tuned.arguments(inputs, parameters))
            outputs = graph.call_function(operator.getitem, (made, 0))
        if any(draws(operator.kind) for operator in region.model.graph().operators):
            repeat_as_drawn(made)
        return [graph.call_function(operator.getitem, (outputs, number)) for number in range(len(region.outputs))]

    return write


def _without_history(
    graph: fx.Graph, results: RegionResults, *given: Sequence[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return a region's inputs and parameters, detached where no gradient reaches them.

    So no backward runs in front of them, which may make zeros of a gradient that is None.
    """
    inputs, parameters = ([True] * len(each) for each in given)
    found = results.reached([True] * len(results.outputs), inputs, parameters)
    detached = [
        [node if want else graph.call_method("detach", (node,)) for node, want in zip(nodes, wanted, strict=True)]
        for nodes, wanted in zip(given, found, strict=True)
    ]
    return detached[0], detached[1]


def _held(example_inputs: Sequence[Any]) -> tuple["ref[Tensor]", ...]:
    return tuple(ref(each) for each in example_inputs if isinstance(each, nn.Parameter))


def _is_cut_by_ddp() -> bool:
    """Tell whether dynamo cuts what it compiles now, as it does inside of DistributedDataParallel by default."""
    active = nn.parallel.DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    return active is not None and torch._dynamo.config.optimize_ddp in (True, "ddp_optimizer")


def _device_type(example_inputs: Sequence[Any]) -> str:
    """Return the type of the device that computes: the host's tensors beside another device's are few and small."""
    types = {each.device.type for each in example_inputs if isinstance(each, Tensor)}
    return min(types - {CPU, "meta"}, default=CPU)


def compiler_of(name: str, mode: str | None = None, inductor: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Return the compiler of what is not tuned; `mode` and `inductor` are of Inductor."""
    note_generators()
    if name == "inductor":
        from torch import _TorchCompileInductorWrapper
        from torch._inductor import config

        from autotuner.runtime.capture import embedding_gradients, kept_between

        options = dict(inductor or {})
        passes = {
            embedding_gradients.OPTION: embedding_gradients.EmbeddingGradients(),
            kept_between.OPTION: kept_between.KeptBetween(),
        }
        options = {name: own for name, own in passes.items() if getattr(config, name) is None} | options
        wrapper: Callable[..., Any] = _TorchCompileInductorWrapper(  # type: ignore[no-untyped-call]
            mode or "default", options, None
        )
        return wrapper
    found: Callable[..., Any] = torch._dynamo.lookup_backend(name)
    return (lambda module, inputs: found(with_checkpoints(module), inputs)) if name == "eager" else found


def _knowledge(given: Mapping[str, Any]) -> Knowledge:
    plans: tuple[Numerics, int | None] = (
        given.get("numerics", "exact"), parsed_bytes(given.get("budget_bytes"), "budget_bytes"),
    )  # fmt: skip
    if given.get("configurations") is not None:
        return OfConfigurations(given["configurations"])
    if given.get("server") is not None:
        return OfService(given["server"], *plans)
    if given.get("database") is not None:
        return OfDatabase(given["database"], *plans)
    settings = Settings.from_environment()
    if os.environ.get("AUTOTUNER_SERVER", "").strip():
        return OfService(settings.server_url, *plans)
    return OfDatabase(settings.database_url, *plans)
