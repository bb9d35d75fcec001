"""search_spaces/kernels/*.yaml and the kernels' own rules -> what could compute each part of a graph, and how."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import autotuner.kernels.catalogue  # noqa: F401  (registers every kernel)
from autotuner.errors import DeviceError, SpaceError
from autotuner.fusion import Cover, covers, stack_families
from autotuner.graph import Graph
from autotuner.kernels import KERNELS, Kernel
from autotuner.kernels.canonical import canonical
from autotuner.kernels.conversion import conversion
from autotuner.layout import STACK_AXIS, Form
from autotuner.models import search_spaces_dir
from autotuner.records import LETTERS, Call, Candidate, Scalar, Subgraph, TensorType


class KernelEntry(BaseModel):
    """What to try of one kernel."""

    model_config = ConfigDict(extra="forbid")

    layouts: Literal["all", "declared"] = "all"
    params: dict[str, list[Scalar]] = Field(default_factory=dict)


class SpaceFile(BaseModel):
    """A file of `search_spaces/kernels/`."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[1]
    device_type: str
    max_operators: int = Field(default=8, ge=1)
    kernels: dict[str, KernelEntry]
    conversions: list[str]


def load_space(path: Path) -> SpaceFile:
    """Read a search space.

    Raises:
        SpaceError: the file is missing or malformed, or names a kernel that is not registered.
    """
    try:
        space = SpaceFile.model_validate(yaml.safe_load(path.read_text()))
    except FileNotFoundError as error:
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml")))
        raise SpaceError(f"{path}: no such search space; in that folder: {known or 'none'}") from error
    except (yaml.YAMLError, ValidationError, OSError) as error:
        raise SpaceError(f"{path}: {error}") from error
    unknown = [name for name in (*space.kernels, *space.conversions) if name not in KERNELS]
    if unknown:
        known = ", ".join(sorted(kernel.name for kernel in KERNELS))
        raise SpaceError(f"{path}: no kernel {unknown[0]!r}; known: {known}")
    return space


def space_file(device_type: str, path: str | Path | None = None) -> SpaceFile:
    """Return the search space of a device type, or the one at a path.

    Raises:
        SpaceError: there is none, or it cannot be used.
        DeviceError: the file at the path is for another device type.
    """
    found = load_space(Path(path) if path else search_spaces_dir() / "kernels" / f"{device_type}.yaml")
    if found.device_type != device_type:
        raise DeviceError(f"{path}: it is for device type {found.device_type!r}, asked for is {device_type!r}")
    return found


@dataclass(frozen=True)
class Choice:
    """One way to compute a cover: a candidate, the forms it asks of named tensors, and the call that it executes.

    `forms` are texts in the tensors' own axes, in the order of the cover's boundary.
    """

    cover: Cover
    candidate: Candidate
    forms: tuple[str, ...]
    call: Call

    @cached_property
    def by_tensor(self) -> dict[str, str]:
        return dict(zip(self.cover.inputs + self.cover.outputs, self.forms, strict=True))


@dataclass(frozen=True)
class Conversion:
    """A copy of one tensor from the form it was made in to another."""

    tensor: str
    source: str
    target: str
    candidate: Candidate
    call: Call


@dataclass(frozen=True)
class Space:
    """Everything that could compute a graph: choices per cover, and conversions between forms of a tensor."""

    graph: Graph
    choices: tuple[Choice, ...]
    conversions: tuple[Conversion, ...]
    given: Mapping[str, tuple[str, ...]]
    """For tensors from outside and for outputs: the forms that they may have there."""

    @cached_property
    def calls(self) -> dict[str, Call]:
        """Distinct calls by key: what there is to measure."""
        calls = {choice.call.key: choice.call for choice in self.choices}
        return calls | {conversion.call.key: conversion.call for conversion in self.conversions}


def build_space(graph: Graph, file: SpaceFile) -> Space:
    """Enumerate the space of a graph."""
    found = tuple(covers(graph, tuple(file.kernels), file.max_operators))
    families = stack_families(graph)
    given = given_forms(graph, families)
    enumerated = _Enumeration(graph, file, families, given)
    anchored = [choice for cover in found for choice in enumerated.choices(cover, anchors=True)]
    domains = _domains(graph, anchored, given)
    following = [choice for cover in found for choice in enumerated.choices(cover, anchors=False, domains=domains)]
    choices = _reachable(graph, anchored + following, given, convert=bool(file.conversions))
    conversions = tuple(_conversions(graph, choices, given, file.conversions))
    return Space(graph, tuple(choices), conversions, given)


def given_forms(graph: Graph, families: Iterable[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the forms that tensors may have where the graph meets its caller.

    Inputs, outputs and their gradients are as declared. A parameter, and its gradient with it, lies in an order that
    the framework's own parameter can take by strides alone: output axes then input axes, or the reverse.
    """
    given: dict[str, tuple[str, ...]] = {}
    for name, tensor in graph.tensors.items():
        gradient_of = graph.tensors.get(name.removeprefix("grad_")) if tensor.role == "gradient" else None
        if tensor.role == "parameter":
            given[name] = _storable(graph, name, families)
        elif gradient_of and gradient_of.role == "parameter" and name in graph.outputs:
            given[name] = tuple(_of_gradients(text) for text in _storable(graph, gradient_of.name, families))
        elif tensor.role == "input" or name in graph.given_gradients or name in graph.outputs:
            given[name] = (tensor.axes,)
    return given


def _storable(graph: Graph, parameter: str, families: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return a parameter's forms: as declared, or with what a contraction sums over slowest."""
    axes = graph.tensors[parameter].axes
    reader = next((o for o in graph.consumers[parameter] if o.kind == "contraction"), None)
    if reader is None or len(axes) < 2:
        return (axes,)
    operand = reader.inputs.index(parameter)
    letters, result = reader.input_axes[operand], reader.output_axes[0]
    summed = "".join(a for a, x in zip(axes, letters, strict=True) if x not in result)
    kept = "".join(a for a, x in zip(axes, letters, strict=True) if x in result)
    stack = next((f for f in families if parameter in f and len(f) > 2), None) or next(
        (f for f in families if parameter in f), None
    )
    if stack:
        return axes, f"{summed}{STACK_AXIS}{kept}@{stack.index(parameter)}/{len(stack)}#{'+'.join(stack)}"
    return tuple(dict.fromkeys((axes, summed + kept, kept + summed)))


def _of_gradients(text: str) -> str:
    """Return a parameter's form as its gradient has it: a stack's members are the gradients of the parameter's."""
    form, mark, group = text.partition("#")
    return form + mark + "+".join(f"grad_{member}" for member in group.split("+") if member)


class _Enumeration:
    """Turns a cover and a kernel's rules into choices."""

    def __init__(
        self, graph: Graph, file: SpaceFile, families: tuple[tuple[str, ...], ...], given: Mapping[str, tuple[str, ...]]
    ) -> None:
        self.graph = graph
        self.named = {operator.name: operator for operator in graph.operators}
        self.file = file
        self.given = given
        self.families = families
        self.pitches = _pitches(graph, families, given)
        self._layouts: dict[tuple[str, str], list[tuple[str, ...]]] = {}
        self._calls: dict[tuple[str, Candidate], Call] = {}
        self._refusals: dict[tuple[str, Candidate], str | None] = {}

    def choices(
        self, cover: Cover, *, anchors: bool, domains: Mapping[str, set[str]] | None = None
    ) -> Iterator[Choice]:
        operators = [self.named[name] for name in cover.recomputed + cover.operators]
        subgraph = self.graph.subgraph(operators, cover.inputs, cover.outputs)
        for name in cover.kernels:
            kernel = KERNELS[name]
            if kernel.anchors != anchors:
                continue
            entry = self.file.kernels[name]
            for row in self._rows(kernel, entry, subgraph):
                for forms in self._in_graph(cover, kernel, row):
                    if domains is not None and not self._wanted(cover, forms, domains):
                        continue
                    yield from self._with_params(cover, kernel, entry, subgraph, forms)

    def _rows(self, kernel: Kernel, entry: KernelEntry, subgraph: Subgraph) -> list[tuple[str, ...]]:
        key = (kernel.name, subgraph.signature)
        if key not in self._layouts:
            rows = list(dict.fromkeys(kernel.layouts(subgraph)))
            if entry.layouts == "declared":
                declared = tuple(subgraph.tensors[number].axes for number in subgraph.boundary)
                rows = [row for row in rows if tuple(text.split(":")[0] for text in row) == declared]
            self._layouts[key] = rows
        return self._layouts[key]

    def _in_graph(self, cover: Cover, kernel: Kernel, row: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """Write a row in the tensors' own axes, with stack members' names, and with pitched variants."""
        texts = []
        for name, text in zip(cover.inputs + cover.outputs, row, strict=True):
            form = Form.parse(text).renamed(
                LETTERS[: len(self.graph.tensors[name].axes)], self.graph.tensors[name].axes
            )
            if form.stack:
                texts.append([self._member(name, form)])
            else:
                texts.append([str(form), *(self.pitches.get((name, str(form)), ()) if kernel.pitched else ())])
        for forms in product(*texts):
            if self._whole_stacks(cover, forms) and all(
                name not in self.given or plain(text) in self.given[name] or len(self.graph.tensors[name].axes) > 1
                for name, text in zip(cover.inputs + cover.outputs, forms, strict=True)
            ):
                yield forms

    def _whole_stacks(self, cover: Cover, forms: tuple[str, ...]) -> bool:
        """Tell whether siblings are pitched together: a slice's siblings in a row are slices of the same stack."""
        by_tensor = dict(zip(cover.inputs + cover.outputs, forms, strict=True))
        for text in forms:
            group = text.partition("#")[2]
            if group and any(m in by_tensor and not by_tensor[m].endswith("#" + group) for m in group.split("+")):
                return False
        return True

    def _positional(self, name: str) -> tuple[str, str]:
        axes = self.graph.tensors[name].axes
        return axes, LETTERS[: len(axes)]

    def _member(self, name: str, form: Form) -> str:
        assert form.stack is not None
        family = next(f for f in self.families if len(f) == form.stack.count and f[form.stack.index] == name)
        return f"{form.layout.axes}@{form.stack.index}/{form.stack.count}#{'+'.join(family)}"

    def _wanted(self, cover: Cover, forms: tuple[str, ...], domains: Mapping[str, set[str]]) -> bool:
        """Keep a row if some wide operand has a form that an anchor uses, or all are as declared."""
        names = cover.inputs + cover.outputs
        wide = max(len(self.graph.tensors[name].axes) for name in names)
        pairs = [
            (n, plain(t).split(":")[0])
            for n, t in zip(names, forms, strict=True)
            if len(self.graph.tensors[n].axes) == wide
        ]
        if all(text == self.graph.tensors[name].axes for name, text in pairs):
            return True
        return any(text in domains.get(name, ()) for name, text in pairs)

    def _with_params(
        self, cover: Cover, kernel: Kernel, entry: KernelEntry, subgraph: Subgraph, forms: tuple[str, ...]
    ) -> Iterator[Choice]:
        names = cover.inputs + cover.outputs
        local = tuple(
            str(Form.parse(text).nameless().renamed(*self._positional(name)))
            for name, text in zip(names, forms, strict=True)
        )
        for values in product(*entry.params.values()):
            candidate = Candidate(kernel.name, local, tuple(zip(entry.params, values, strict=True)), kernel.version)
            key = (subgraph.signature, candidate)
            if key not in self._refusals:
                self._refusals[key] = kernel.refuses(subgraph, candidate)
                if self._refusals[key] is None:
                    self._calls[key] = canonical(subgraph, candidate)
            if self._refusals[key] is None:
                yield Choice(cover, candidate, tuple(plain(text) for text in forms), self._calls[key])


def plain(text: str) -> str:
    """Return a form as neighbours see it: a slice with the stacking axis outermost is an ordinary dense tensor."""
    return text.split("@")[0].removeprefix(STACK_AXIS) if text.startswith(STACK_AXIS) else text


def _pitches(
    graph: Graph, families: Iterable[tuple[str, ...]], given: Mapping[str, tuple[str, ...]]
) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return, per tensor and dense form, the forms in which it lies pitched among its siblings.

    Activations and their gradients lie as rows, stack, features; weights as their storable form says.
    """
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for family in families:
        for index, name in enumerate(family):
            tensor = graph.tensors[name]
            suffix = f"@{index}/{len(family)}#{'+'.join(family)}"
            if name in given:
                for text in given[name]:
                    if text.endswith(suffix):
                        found[name, text.split("@")[0].replace(STACK_AXIS, "")].append(text)
            elif len(tensor.axes) == 4:
                layout = f"{tensor.axes[:2]}{STACK_AXIS}{tensor.axes[2:]}"
                found[name, tensor.axes].append(layout + suffix)
    return {key: tuple(texts) for key, texts in found.items()}


def _domains(graph: Graph, anchored: Iterable[Choice], given: Mapping[str, tuple[str, ...]]) -> dict[str, set[str]]:
    domains: dict[str, set[str]] = {name: {tensor.axes, *given.get(name, ())} for name, tensor in graph.tensors.items()}
    for choice in anchored:
        for name, text in choice.by_tensor.items():
            domains[name].add(text)
    return domains


def _reachable(
    graph: Graph, choices: list[Choice], given: Mapping[str, tuple[str, ...]], *, convert: bool
) -> list[Choice]:
    """Drop choices that no whole assignment can contain, until nothing changes.

    A choice goes when it reads a form that nobody makes and no conversion leads to, or makes one that nobody can use.
    """
    while True:
        made: dict[str, set[str]] = {name: set(forms) for name, forms in given.items() if name not in graph.producers}
        read: dict[str, set[str]] = defaultdict(set)
        for choice in choices:
            for name in choice.cover.outputs:
                made.setdefault(name, set()).add(choice.by_tensor[name])
            for name in choice.cover.inputs:
                read[name].add(choice.by_tensor[name])
        for name in graph.outputs:
            read[name] |= set(given[name])
        unread = {
            n for n in graph.tensors if graph.tensors[n].optional or not (graph.consumers[n] or n in graph.outputs)
        }
        kept = [
            choice for choice in choices
            if all(_joins(made.get(n, ()), [choice.by_tensor[n]], convert) for n in choice.cover.inputs)
            and all(n in unread or _joins([choice.by_tensor[n]], read[n], convert) for n in choice.cover.outputs)
        ]  # fmt: skip
        if len(kept) == len(choices):
            return kept
        choices = kept


def _joins(sources: Collection[str], targets: Collection[str], convert: bool) -> bool:
    """Tell whether some source is a target, or can be converted into one."""
    return any(
        source == target or (convert and convertible(source, target)) for source in sources for target in targets
    )


def convertible(source: str, target: str) -> bool:
    """Tell whether a conversion between two forms is worth measuring: same storage, another order, to a dense one.

    Slices of stacks are written by kernels only; no conversion leads into one.
    """
    if "absent" in (source, target) or source == target:
        return False
    first, second = Form.parse(source), Form.parse(target)
    return first.storage == second.storage and second.stack is None and len(second.layout.axes) > 1


def _conversions(
    graph: Graph, choices: Iterable[Choice], given: Mapping[str, tuple[str, ...]], kernels: Iterable[str]
) -> Iterator[Conversion]:
    made: dict[str, set[str]] = {name: set(forms) for name, forms in given.items()}
    read: dict[str, set[str]] = {name: set(given[name]) for name in graph.outputs}
    for choice in choices:
        for name in choice.cover.outputs:
            made.setdefault(name, set()).add(choice.by_tensor[name])
        for name in choice.cover.inputs:
            read.setdefault(name, set()).add(choice.by_tensor[name])
    for name, sources in made.items():
        tensor = graph.tensors[name]
        subgraph = conversion(TensorType(graph.shape(name), tensor.dtype))
        local = LETTERS[: len(tensor.axes)]
        for source, target in product(sorted(sources), sorted(read.get(name, ()))):
            if not convertible(source, target):
                continue
            forms = tuple(str(Form.parse(t).nameless().renamed(tensor.axes, local)) for t in (source, target))
            for kernel in kernels:
                candidate = Candidate(kernel, forms, (), KERNELS[kernel].version)
                yield Conversion(name, source, target, candidate, canonical(subgraph, candidate))


def describe(file: SpaceFile) -> dict[str, Any]:
    """Return a search space as JSON-able data, for people and programs."""
    return {
        "device_type": file.device_type,
        "max_operators": file.max_operators,
        "kernels": {
            name: {"covers": list(KERNELS[name].covers), "layouts": entry.layouts, "params": entry.params}
            for name, entry in file.kernels.items()
        },
        "conversions": file.conversions,
    }
