"""Every call that the kernels' own rules admit on a transformer's layer, with made-up operands, for tests."""

import json
import os
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph
from autotuner.ir.models import load_model, search_spaces_dir
from autotuner.ir.records import Call, Candidate, Node, Scalar, Subgraph, TensorType
from autotuner.kernels import KERNELS
from autotuner.measure.operands import Buffers, Values
from autotuner.measure.verification import References, fault
from autotuner.space import SpaceFile, build_space, load_space
from autotuner.space.fusion import covers

SITES = ("attention_dropout", "output_dropout", "activation_dropout", "feed_forward_dropout")
ODD = {"b": 3, "l": 5, "h": 6, "n": 2, "p": 3, "f": 7}
# Batched products of 400 multiplications and more go to the library, smaller ones to a loop of torch's own.
ROOMY = {"b": 3, "l": 17, "h": 15, "n": 3, "p": 5, "f": 19}
VARIANTS: tuple[Mapping[str, Scalar], ...] = (
    {"p": 0.25},
    {"p": 0.0, "activation": "gelu_tanh"},
    {"p": 0.0, "activation": "relu", "attention_mask": True},
    {"p": 0.0, "model": "gpt-block"},
)
# Torch wraps a number as a tensor of one element.
SCALAR_BYTES = 16

FILE: SpaceFile = load_space(search_spaces_dir() / "kernels" / "cpu.yaml")


def layer(
    extents: Mapping[str, int],
    dtype: str = "float64",
    *,
    p: float = 0.25,
    model: str = "bert-encoder",
    **options: Scalar,
) -> Graph:
    """Return the training graph of a model's layer whose dropouts all have the same p."""
    file = load_model(model)
    chosen = {site: p for site in SITES if site in file.definition.options} | options
    return training_graph(file.instantiate(None, extents, chosen, dtype).graph())


def subgraphs(graph: Graph) -> Iterator[tuple[str, Subgraph]]:
    """Yield (kernel, subgraph) for everything in a graph that a kernel of the CPU's search space covers."""
    named = {operator.name: operator for operator in graph.operators}
    for cover in covers(graph, tuple(FILE.kernels), FILE.max_operators):
        members = [named[name] for name in cover.recomputed + cover.operators]
        for kernel in cover.kernels:
            yield kernel, graph.subgraph(members, cover.inputs, cover.outputs)


@cache
def _space_calls(extents: tuple[tuple[str, int], ...], dtype: str, variant: int) -> Mapping[str, Sequence[Call]]:
    """Return the calls of a layer's search space by kernel."""
    graph = layer(dict(extents), dtype, **VARIANTS[variant])  # type: ignore[arg-type]
    found: dict[str, list[Call]] = {}
    for call in build_space(graph, FILE).calls.values():
        found.setdefault(call.candidate.kernel, []).append(call)
    return found


@cache
def _covered(extents: tuple[tuple[str, int], ...], dtype: str, variant: int) -> Mapping[str, Sequence[Subgraph]]:
    """Return what each kernel covers in a layer."""
    found: dict[str, dict[Subgraph, None]] = {}
    for name, subgraph in subgraphs(layer(dict(extents), dtype, **VARIANTS[variant])):  # type: ignore[arg-type]
        found.setdefault(name, {})[subgraph] = None
    return {name: tuple(own) for name, own in found.items()}


def admitted(
    kernel: str, extents: Mapping[str, int], dtype: str = "float64", variants: Sequence[int] = range(len(VARIANTS))
) -> list[Call]:
    """Return the distinct calls of a kernel over variants of the layer: every row of layouts that its rule enumerates
    and does not refuse, and, with pitched operands and merged axes, every call of the search space."""
    rule = KERNELS[kernel]
    found: dict[Call, None] = {}
    seen: set[Subgraph] = set()
    for variant in variants:
        key = (tuple(extents.items()), dtype, variant)
        found |= dict.fromkeys(_space_calls(*key).get(kernel, ()))
        for subgraph in _covered(*key).get(kernel, ()):
            if subgraph not in seen:
                seen.add(subgraph)
                rows = (Candidate(kernel, row) for row in dict.fromkeys(rule.layouts(subgraph)))
                found |= {Call(subgraph, row): None for row in rows if rule.refuses(subgraph, row) is None}
    return list(found)


@dataclass(frozen=True)
class Prepared:
    """A kernel built on operands that lie as its call's forms say."""

    call: Call
    values: Values
    inputs: Sequence[Tensor | None]
    outputs: Sequence[Tensor | None]
    run: Callable[[], Any]


def prepare(call: Call, values: Values | None = None) -> Prepared:
    """Make operands up and build the kernel on them."""
    kernel = KERNELS[call.candidate.kernel]
    values = values or Values(call.subgraph, kernel.consistent)
    buffers = Buffers(values.device)
    inputs, outputs = buffers.inputs(call, values, 0), buffers.outputs(call, values, 0)
    return Prepared(call, values, inputs, outputs, kernel.builder()(call, inputs, outputs))


def faults(calls: Sequence[Call], device: str = "cpu") -> dict[str, str]:
    """Return what is wrong, by call: a result that is not that of `kernels.reference.evaluate` in float64, an element
    not written, an input changed, or an output left in other strides than its form's."""
    found: dict[str, str] = {}
    references = References()
    values: dict[Subgraph, Values] = {}
    for call in calls:
        kernel = KERNELS[call.candidate.kernel]
        if call.subgraph not in values:
            values[call.subgraph] = Values(call.subgraph, kernel.consistent, torch.device(device))
        made = prepare(call, values[call.subgraph])
        reason = fault(call, kernel, made.run, made.values, references, made.inputs, made.outputs)
        if reason:
            found[f"{call.subgraph.kinds} {call.candidate.forms}"] = reason
    return found


@dataclass(frozen=True)
class Copied:
    """What the library did beside its work in one run: bytes of each allocation, and operands that it copied whole."""

    allocated: tuple[int, ...]
    clones: int


def copied(calls: Sequence[Call]) -> list[tuple[Call, Copied]]:
    """Run each call once under torch's profiler and return what it allocated and cloned."""
    ready = [prepare(call).run for call in calls]
    for run in ready:
        run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for number, run in enumerate(ready):
            with record_function(f"call {number}"):
                run()
    events = list(profiler.profiler.kineto_results.events())
    spans = sorted((e.start_ns(), e.end_ns(), int(e.name()[5:])) for e in events if e.name().startswith("call "))
    assert len(spans) == len(calls)
    starts = [start for start, _, _ in spans]
    allocated: list[list[int]] = [[] for _ in calls]
    clones = [0] * len(calls)
    for event in events:
        place = bisect_right(starts, event.start_ns()) - 1
        if place < 0 or event.start_ns() > spans[place][1]:
            continue
        number = spans[place][2]
        if event.name() == "[memory]" and event.nbytes() > SCALAR_BYTES:
            allocated[number].append(event.nbytes())
        clones[number] += event.name() == "aten::clone"
    return [(call, Copied(tuple(sizes), count)) for call, sizes, count in zip(calls, allocated, clones, strict=True)]


def hidden_copies(calls: Sequence[Call]) -> dict[str, Copied]:
    """Return the calls that allocate or clone anything."""
    return {
        f"{call.subgraph.kinds} {call.candidate.forms}": found
        for call, found in copied(calls)
        if found.allocated or found.clones
    }


def interpreted(module: str) -> Any:
    """Return what a module prints as JSON where Triton's interpreter runs its programs."""
    ran = subprocess.run(
        [sys.executable, "-m", module],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def repeated_norm(batch: int, length: int, width: int, order: str = "ab") -> Subgraph:
    """Return a layer norm whose result and statistics are made anew beside its gradients.

    Args:
        order: of the statistics' axes.
    """
    full, row = TensorType((batch, length, width), "float32"), TensorType((width,), "float32")
    extents = {"a": batch, "b": length}
    statistic = TensorType(tuple(extents[axis] for axis in order), "float32")
    return Subgraph(
        (
            Node("layer_norm", f"abc,c,c->abc,{order},{order}", (0, 1, 2), (7, 8, 9), (("epsilon", 1e-5),)),
            Node("layer_norm_grad_parameters", f"abc,abc,{order},{order}->c,c", (3, 0, 8, 9), (4, 5)),
            Node("layer_norm_grad_input", f"abc,abc,c,{order},{order}->abc", (3, 0, 1, 8, 9), (6,)),
        ),
        (full, row, row, full, row, row, full, full, statistic, statistic),
        (0, 1, 2, 3), (4, 5, 6, 7),
    )  # fmt: skip
