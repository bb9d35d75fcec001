"""Which forms of a tensor lead to which, and which choices no whole assignment can contain."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import product

from autotuner.graph import Graph
from autotuner.kernels import KERNELS
from autotuner.kernels.canonical import canonical
from autotuner.kernels.conversion import conversion
from autotuner.layout import Form
from autotuner.records import LETTERS, Candidate, TensorType
from autotuner.space.choices import Choice, Conversion


def reachable(
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


def conversions_of(
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
