"""Counts of one architecture for scripts/coverage: the flop that its regions have, and what ends them."""

import copy
import importlib.util
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

from autotuner.api.backend import capture
from autotuner.ir.autodiff import training_graph
from autotuner.ir.cost import operator_flop
from autotuner.ir.kinds import kind_of
from autotuner.ir.models import Model
from autotuner.ir.scores import cap_of
from autotuner.runtime.capture.calls import calls_of, flop_counter
from autotuner.runtime.capture.left_out import Parts
from autotuner.runtime.coverage import LeftOut, merged
from autotuner.runtime.own_code import with_own_code
from autotuner.space import build_space, space_file
from autotuner.space.fusion import covers
from scripts.bench.architectures import Architecture, Made, architectures

FUSED = "triton_attention"
OF_SCORES = ("scale", "bias", "mask", "causal_mask", "pointwise", "program", "cast")
SMALL = 2
"""A region of so few operators is told: there is little to tune in it."""
REASONS = 8
_DIGITS = re.compile(r"\d+")


@dataclass
class GraphCount:
    """One graph of dynamo's, and how often it ran in a forward.

    Args:
        flop, found_flop: of all calls, and of those in regions.
        layers_flop, layers_found_flop: the same of the layers that repeat.
        layers: paths of those layers.
        read_s: seconds from the graph to its regions.
    """

    flop: int
    found_flop: int
    layers_flop: int
    layers_found_flop: int
    layers: set[str]
    models: list[Model]
    left_out: tuple[LeftOut, ...]
    why_not: str
    read_s: float
    backend_s: float = 0.0
    runs: int = 0


@dataclass
class Layers:
    """The layers of a model that repeat: modules with a number in a container, outermost ones, made of other modules.

    Args:
        paths: of those layers.
        names: of all modules.
    """

    paths: set[str]
    names: set[str]

    @classmethod
    def of(cls, module: nn.Module, within: str = "") -> "Layers":
        """Find the layers of a model, those with a text in their path."""
        modules = dict(module.named_modules())
        found: set[str] = set()
        for path, each in modules.items():
            outer, _, own = path.rpartition(".")
            if within not in path or not _DIGITS.search(own) or any(path.startswith(f"{one}.") for one in found):
                continue
            siblings = [
                name for name, other in modules[outer].named_children()
                if type(other) is type(each) and _DIGITS.sub("", name) == _DIGITS.sub("", own)
            ]  # fmt: skip
            alone = len(siblings) < 2 and not isinstance(modules[outer], nn.ModuleList)
            if not alone and next(each.children(), None) is not None:
                found.add(path)
        return cls(found, set(modules))

    def of_path(self, path: str) -> str:
        """Return the layer that a module is in; "" where it is in none."""
        parts = path.split(".")
        heads = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return next((head for head in heads if head in self.paths), "")

    def before(self, paths: set[str]) -> str:
        """Return what stands before paths that begin inside of the model, as where a graph does: "layers.0." or "".

        Of several places where such modules are, as in all layers, it is the first.
        """
        if not paths or paths & self.names:
            return ""
        last = f".{next(iter(paths))}"
        heads = sorted(name.removesuffix(last) for name in self.names if name.endswith(last))
        found = next((head for head in heads if all(f"{head}.{path}" in self.names for path in paths)), "")
        return found and f"{found}."


def counted(architecture: Architecture, tracing: bool = True) -> dict[str, Any]:
    """Return a row: what of an architecture's forward is in regions, in train mode, and what ends them.

    Args:
        tracing: whether dynamo's and AOTAutograd's own tracing is timed too.
    """
    module, batch = made(architecture)
    module.train()
    layers = Layers.of(module, architecture.layers)
    eager_flop, eager_layers_flop, eager_s = _eager(module, batch, layers)
    graphs, first_s = _graphs(module, batch, layers)
    flop = sum(graph.runs * graph.flop for graph in graphs)
    layers_flop = sum(graph.runs * graph.layers_flop for graph in graphs)
    found = sum(graph.runs * graph.layers_found_flop for graph in graphs)
    # What dynamo leaves to Python is in no graph, and counts as well.
    of_layers = max(layers_flop, eager_layers_flop)
    whole = of_layers + max(flop - layers_flop, eager_flop - eager_layers_flop)
    models = Counter(model.name for graph in graphs for model in graph.models * graph.runs)
    by_name = {model.name: model for graph in graphs for model in graph.models}
    parts = merged(part for graph in graphs for part in graph.left_out)
    if eager_layers_flop > 1.01 * layers_flop:
        note = "in no graph: dynamo leaves it to Python, or torch runs it as something else"
        parts = merged([*parts, LeftOut("", 0, eager_layers_flop - layers_flop, note)])
    return {
        "share": found / of_layers if of_layers else 0.0,
        "share_of_all": sum(graph.runs * graph.found_flop for graph in graphs) / whole if whole else 0.0,
        "layers_flop": of_layers,
        "flop": whole,
        "layers": len(layers.paths),
        "graphs": len(graphs),
        "regions": [
            {"runs": runs, "kinds": kinds_in(by_name[name]), "flop": flop_of_products(by_name[name]),
             "attentions": len(attentions(by_name[name])), "fused_attentions": fused_attentions(by_name[name])}
            for name, runs in models.items()
        ],
        "tuned_share": sum(runs * several(by_name[name]) for name, runs in models.items()) / of_layers
        if of_layers else 0.0,
        "reasons": [
            {"module": part.module, "share": part.flop / of_layers if of_layers else 0.0, "reason": part.reason}
            for part in parts[:REASONS]
        ],
        "why_not": next((graph.why_not for graph in graphs if graph.why_not), ""),
        "read_s": sum(graph.read_s for graph in graphs),
        "dynamo_s": max(0.0, first_s - eager_s - sum(graph.backend_s for graph in graphs)),
        **({"aot_s": max(0.0, _first_call_s(architecture) - eager_s)} if tracing else {}),
    }  # fmt: skip


def made(architecture: Architecture) -> Made:
    """Return the model and batch of an architecture, always the same."""
    torch.manual_seed(0)
    return architecture.make()


def largest_region(name: str) -> Model:
    """Return the region of most operators of an architecture."""
    module, batch = made(architectures()[name])
    models: list[Model] = []

    def backend(graph_module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        found = capture(graph_module)
        models.extend(region.model for region in (() if isinstance(found, str) else found.regions))
        return graph_module.forward

    _first_call(module.train(), batch, backend)
    return max(models, key=lambda model: len(model.graph().operators))


def missing(architecture: Architecture) -> str:
    """Return the package that an architecture needs and that is not installed, or "" where all is there."""
    needs = architecture.needs or ("" if architecture.family == "own code" else architecture.family)
    return needs if needs and importlib.util.find_spec(needs) is None else ""


def call(called: Callable[..., Any], batch: Mapping[str, Any] | Sequence[Any]) -> Any:
    """Call a model with its batch."""
    return called(**batch) if isinstance(batch, Mapping) else called(*batch)


def _eager(module: nn.Module, batch: Any, layers: Layers) -> tuple[int, int, float]:
    """Return torch's count of a forward's flop, that of its layers, and the forward's seconds."""
    # Of the kernels of attention on a CPU, the counter knows the products of the plain one alone.
    with flop_counter() as counter, sdpa_kernel(SDPBackend.MATH):
        call(module, batch)
    counts = counter.get_flop_counts()
    root = type(module).__name__
    inside = {path for path in counts if layers.of_path(path.removeprefix(f"{root}."))}
    # A list of modules is never called itself: its parts are counted then.
    outermost = [path for path in inside if not any(path.startswith(f"{other}.") for other in inside)]
    by_layer = sum(sum(counts[path].values()) for path in outermost)
    began = time.perf_counter()
    call(module, batch)
    return counter.get_total_flops(), by_layer, time.perf_counter() - began


def _graphs(module: nn.Module, batch: Any, layers: Layers) -> tuple[list[GraphCount], float]:
    """Return the graphs that dynamo makes of a call, and the seconds of the first one."""
    graphs: list[GraphCount] = []

    def backend(graph_module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        began = time.perf_counter()
        graph = count_graph(graph_module, layers)
        graphs.append(graph)
        graph.backend_s = time.perf_counter() - began

        def run(*arguments: Any) -> Any:
            graph.runs += 1
            return graph_module.forward(*arguments)

        return run

    return graphs, _first_call(module, batch, backend)


def _first_call(module: nn.Module, batch: Any, backend: Any) -> float:
    def forward(*arguments: Any, **named: Any) -> Any:
        return module(*arguments, **named)

    compiled = torch.compile(with_own_code(forward), backend=backend, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=256):
        began = time.perf_counter()
        call(compiled, batch)
        return time.perf_counter() - began


def _first_call_s(architecture: Architecture) -> float:
    """Return the seconds of a first call that dynamo and AOTAutograd trace, forward and backward."""
    torch._dynamo.reset()
    module, batch = made(architecture)
    return _first_call(module.train(), batch, "aot_eager")


def count_graph(module: fx.GraphModule, layers: Layers) -> GraphCount:
    """Count one graph of dynamo's: its flop, that of its regions, and the same of the layers that repeat."""
    began = time.perf_counter()
    captured = capture(module)
    read_s = time.perf_counter() - began
    regions = () if isinstance(captured, str) else captured.regions
    nodes: set[fx.Node] = set()
    if not isinstance(captured, str):
        nodes = {node for region in regions for node in captured.nodes_of(region)}
    calls = calls_of(module.graph)
    # A graph that begins inside of the model has paths that begin there too; modules of products tell, since small ones
    # of a layer, such as its dropout, may be named as one of the model's.
    paths = {each.module for each in calls if each.module and each.flop}
    before = layers.before(paths)
    inside = {each for each in calls if layers.of_path(before + each.module)}
    coverage = Parts(module.graph, captured).coverage(regions, "")
    left_out = tuple(part for part in coverage.left_out if _is_of_layers(before + part.module, layers))
    return GraphCount(
        flop=sum(each.flop for each in calls),
        found_flop=sum(each.flop for each in calls if each.node in nodes),
        layers_flop=sum(each.flop for each in inside),
        layers_found_flop=sum(each.flop for each in inside if each.node in nodes),
        layers={layers.of_path(before + each.module) for each in inside},
        models=[region.model for region in regions],
        left_out=left_out,
        why_not=captured if isinstance(captured, str) else "",
        read_s=read_s,
    )


def _is_of_layers(module: str, layers: Layers) -> bool:
    """Say whether a path with `*` for numbers is of a layer."""
    if layers.of_path(module):
        return True
    known = {_without_numbers(path) for path in layers.paths}
    module = _without_numbers(module)
    return any(module == path or module.startswith(f"{path}.") for path in known)


def _without_numbers(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def kinds_in(model: Model) -> list[str]:
    return [operator.kind for operator in model.graph().operators]


def flop_of_products(model: Model) -> int:
    graph = model.graph()
    return sum(operator_flop(graph, each) for each in graph.operators if kind_of(each).operator_class == "contraction")


def several(model: Model) -> int:
    """Return the flop of a region's products that more than one candidate could compute."""
    graph = model.graph()
    space = build_space(graph, space_file("cuda"))
    counts = Counter(name for choice in space.choices for name in choice.cover.operators)
    return sum(
        operator_flop(graph, each)
        for each in graph.operators
        if kind_of(each).operator_class == "contraction" and counts[each.name] > 1
    )


def attentions(model: Model) -> set[str]:
    """Return the softmaxes of a region that weigh values, or that begin with a product of what flows on.

    Those of routers, which choose experts, are none.
    """
    graph = model.graph()

    def weighs(tensor: str) -> bool:
        kinds = {each.kind: each for each in graph.consumers[tensor]}
        return "contraction" in kinds or any(
            weighs(each.outputs[0]) for kind, each in kinds.items() if kind in ("dropout", "cast")
        )

    def is_of_scores(tensor: str) -> bool:
        made = graph.producers.get(tensor)
        if made is None or made.kind != "contraction":
            return made is not None and made.kind in OF_SCORES and is_of_scores(made.inputs[0])
        return graph.tensors[made.inputs[1]].role != "parameter"

    softmaxes = [operator for operator in graph.operators if operator.kind == "softmax"]
    return {each.name for each in softmaxes if weighs(each.outputs[0]) or is_of_scores(each.inputs[0])}


def fused_attentions(model: Model) -> int:
    """Return how many attentions of a region this project's kernels for CUDA compute as one, forward and backward,
    where types and sizes of heads are such that they take."""
    graph = training_graph(model.graph())
    operators = {operator.name: operator for operator in graph.operators}
    found: set[str] = set()
    for cover in covers(graph, (FUSED, f"{FUSED}_grad")):
        repeated = [operators[name] for name in cover.recomputed]
        caps = [str(each.attribute("program")) for each in repeated if each.kind == "pointwise"]
        if f"{FUSED}_grad" in cover.kernels and all(cap_of(text) for text in caps):
            found.update(each.name for each in repeated if each.kind == "softmax")
    return len(found)


# Whether tuned regions compute what eager does.


def checked(architecture: Architecture) -> dict[str, Any]:
    """Return how far outputs and gradients are from eager's, with each region in place.

    In float64; in float32 where the model itself does not run in float64, as torch multiplies no experts there.
    Regions run by plans of made-up times, of kernels that need no compiler. Dropout is off: no two runs have the same
    masks.
    """
    from tests.runtime.capture.known import Compilation

    try:
        module, batch, wanted = _in_eager(architecture, torch.float64)
        found: dict[str, Any] = {}
    except RuntimeError:
        module, batch, wanted = _in_eager(architecture, torch.float32)
        found = {"checked_in": "float32"}
    again = _step(copy.deepcopy(module), module, batch)
    if _difference(wanted, again):
        return found | {"check": "eager differs from itself"}
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    compilation = Compilation(module)
    errors = []
    for _ in range(2):
        module.load_state_dict(state)
        step = _step(compilation.model, module, batch)
        if step.keys() != wanted.keys():
            names = sorted(step.keys() ^ wanted.keys())
            return found | {"check": f"other gradients than eager: {', '.join(names[:3])}"}
        errors.append(_difference(step, wanted))
    places = sum(graph.tuned_places for graph in compilation.compiled)
    left = [graph.note for graph in compilation.compiled if graph.note]
    return found | {"error": max(errors), "places": places, **({"check": left[0]} if left else {})}


def _in_eager(architecture: Architecture, dtype: torch.dtype) -> tuple[nn.Module, Any, dict[str, Tensor]]:
    """Return a model in a type, its batch, and what a step of it gives."""
    module, batch = made(architecture)
    without_dropout(module.train().to(dtype))
    batch = tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, batch)
    return module, batch, _step(copy.deepcopy(module), module, batch)


def without_dropout(module: nn.Module) -> None:
    """Set all rates of a model's dropout to 0, in modules and in numbers that they or their configurations hold."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        for holder in (part, getattr(part, "config", None)):
            for name, value in dict(getattr(holder, "__dict__", {})).items():
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)


def _step(called: Any, module: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Return the outputs of a call, and the gradients of a loss of all of them."""
    own = called if isinstance(called, type(module)) else module
    own.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    outputs = [
        each for each in tree_leaves(_plain(call(called, batch)))
        if isinstance(each, Tensor) and each.is_floating_point() and each.requires_grad
    ]  # fmt: skip
    loss = torch.stack([place * (each.sin().mean() + each.mean()) for place, each in enumerate(outputs, 1)]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    grads = {name: each.grad.clone() for name, each in own.named_parameters() if each.grad is not None}
    return grads | {f"output {place}": each.detach() for place, each in enumerate(outputs)}


def _plain(output: Any) -> Any:
    """Return outputs without caches of keys and values, which are no tree of tensors."""
    if isinstance(output, Mapping):
        return {name: each for name, each in output.items() if name != "past_key_values"}
    return output


def _difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Return the largest difference, as a share of the norm of the largest gradient or of its own output."""
    gradients = [float(each.norm()) for name, each in wanted.items() if not name.startswith("output")]
    largest = max(gradients, default=0.0) or 1.0
    return max(
        float((found[name] - each).norm()) / (float(each.norm()) or 1.0 if name.startswith("output") else largest)
        for name, each in wanted.items()
    )


def row_of(architecture: Architecture, check: bool, tracing: bool) -> dict[str, Any]:
    """Return an architecture's row, or why it has none."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _stand_in_for_vision_operators()
    lacking = missing(architecture)
    if lacking:
        return {"status": "not installed", "why": lacking}
    row: dict[str, Any] = {"status": "ok"}
    try:
        row |= counted(architecture, tracing)
    except Exception as error:
        return {"status": "error", "why": _told(error)}
    if check and row["regions"]:
        torch._dynamo.reset()
        try:
            row |= checked(architecture)
        except Exception as error:
            row |= {"check": f"error: {_told(error)}"}
    return row


def warmed_up(architecture: Architecture, check: bool) -> None:
    """Have all imported and ready that every row needs, by making one.

    On one thread: processes that are forked from one that has others would wait for these for ever.
    """
    torch.set_num_threads(1)
    row_of(architecture, check, tracing=False)
    torch._dynamo.reset()


def _told(error: Exception) -> str:
    said = f"{type(error).__name__}: {error}".strip()
    return " ".join(said.split())[:400]


def _stand_in_for_vision_operators() -> None:
    """Declare what torchvision gives shapes of as it is imported: its own library needs the torch it was built with."""
    for name in ("nms", "qnms"):
        if importlib.util.find_spec("torchvision") is not None and not hasattr(torch.ops.torchvision, name):
            signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", signature)
