"""Conversions between forms of a tensor, and removal of choices that no whole assignment can contain."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import product

from autotuner.checkpoint import checkpoint
from autotuner.ir.form import Form, local_form
from autotuner.ir.formats import FORMATS, RAW
from autotuner.ir.graph import Graph
from autotuner.ir.numerics import Numerics
from autotuner.ir.records import LETTERS, Call, Candidate
from autotuner.kernels import KERNELS
from autotuner.kernels.canonical import canonical
from autotuner.kernels.rules.conversion import STORAGE_CHANGES, conversion_of, may_have
from autotuner.space.choices import Choice, Conversion


def reachable(
    graph: Graph,
    choices: list[Choice],
    given: Mapping[str, tuple[str, ...]],
    *,
    convert: bool,
    changing: Collection[str] = (),
) -> list[Choice]:
    """Drop choices that no whole assignment can contain, until nothing changes.

    A choice goes when it reads a form that nobody makes and no conversion leads to, or makes one that nobody can use.

    Args:
        convert: whether conversions are tried at all.
        changing: storage formats between which they lead.
    """

    def joins(name: str, sources: Collection[str], targets: Collection[str]) -> bool:
        """Tell whether some form of a tensor is a target, or can be converted into one."""
        checkpoint()
        return any(
            source == target or (convert and convertible(source, target, changing) and may_have(graph, name, target))
            for source in sources
            for target in targets
        )

    while True:
        made: dict[str, set[str]] = {name: set(forms) for name, forms in given.items() if name not in graph.producers}
        read: dict[str, set[str]] = defaultdict(set)
        for choice in choices:
            checkpoint()
            for name in choice.cover.outputs:
                made.setdefault(name, set()).add(choice.by_tensor[name])
            for name in choice.cover.inputs:
                read[name].add(choice.by_tensor[name])
        for name in graph.outputs:
            read[name] |= set(given[name])
        unread = {
            n for n in graph.tensors if graph.tensors[n].optional or not (graph.consumers[n] or n in graph.outputs)
        }
        had = {(n, form) for n, forms in read.items() for form in forms if joins(n, made.get(n, ()), [form])}
        used = {(n, form) for n, forms in made.items() for form in forms if n in unread or joins(n, [form], read[n])}
        kept = [
            choice for choice in choices
            if all((n, choice.by_tensor[n]) in had for n in choice.cover.inputs)
            and all((n, choice.by_tensor[n]) in used for n in choice.cover.outputs)
        ]  # fmt: skip
        if len(kept) == len(choices):
            return kept
        choices = kept


def changing_formats(numerics: Numerics, *, saving: bool) -> frozenset[str]:
    """Return the storage formats between which conversions lead: raw alone, where nothing more is asked for.

    Args:
        numerics: the class that is allowed.
        saving: whether memory is to be saved.
    """
    offered = (each for each in FORMATS.values() if each.is_offered(saving=saving, numerics=numerics))
    return frozenset({RAW} | {each.name for each in offered if saving or each.numerics != "exact"})


def convertible(source: str, target: str, changing: Collection[str] = ()) -> bool:
    """Tell whether a conversion between two forms is worth measuring: same storage, another order, to a dense one.

    Slices of stacks are written by kernels only; no conversion leads into one.

    Args:
        changing: storage formats between which it may change instead; which tensors may have them, others ask.
    """
    if source == target:
        return False
    first, second = Form.parse(source), Form.parse(target)
    if first.storage != second.storage:
        change = (first.storage, second.storage)
        return first.layout == second.layout and change in STORAGE_CHANGES and set(change) <= set(changing)
    return not first.is_flat and second.stack is None and len(second.layout.axes) > 1


def conversions_of(
    graph: Graph,
    choices: Iterable[Choice],
    given: Mapping[str, tuple[str, ...]],
    kernels: Collection[str],
    changing: Collection[str] = (),
) -> Iterator[Conversion]:
    """Yield the conversions from forms that are made to forms that are read.

    Tensors of equal extents and types are asked about once.

    Args:
        changing: storage formats between which conversions are yielded, too, also those into flat ones and out of them,
            as which a tensor that is made and read otherwise can be held.
    """
    made: dict[str, set[str]] = {name: set(forms) for name, forms in given.items()}
    read: dict[str, set[str]] = {name: set(given[name]) for name in graph.outputs}
    for choice in choices:
        for name in choice.cover.outputs:
            made.setdefault(name, set()).add(choice.by_tensor[name])
        for name in choice.cover.inputs:
            read.setdefault(name, set()).add(choice.by_tensor[name])
    converted: dict[tuple[str, tuple[str, ...]], list[tuple[Candidate, Call]]] = {}
    for name, sources in made.items():
        axes = graph.tensors[name].axes
        local = LETTERS[: len(axes)]
        targets = read.get(name, set())
        held = _held_between(graph, name, sources, targets, changing)
        for source, target in product(sorted(sources | held), sorted(targets | held)):
            checkpoint()
            if not (convertible(source, target, changing) and may_have(graph, name, target)):
                continue
            subgraph = conversion_of(graph, name, source, target)
            forms = tuple(local_form(text, axes, local) for text in (source, target))
            key = (subgraph.signature, forms)
            if key not in converted:
                candidates = (Candidate(kernel, forms, (), KERNELS[kernel].version) for kernel in kernels)
                converted[key] = [
                    (candidate, canonical(subgraph, candidate))
                    for candidate in candidates
                    if KERNELS[candidate.kernel].refuses(subgraph, candidate) is None
                ]
            for candidate, call in converted[key]:
                yield Conversion(name, source, target, candidate, call)


def _held_between(
    graph: Graph, name: str, sources: Iterable[str], targets: Iterable[str], changing: Collection[str]
) -> set[str]:
    """Return the flat forms that a tensor can have between one in which it is made and one in which it is read."""
    made, read = (
        {form for form in map(Form.parse, texts) if form.stack is None and not form.is_absent}
        for texts in (sources, targets)
    )
    between = {
        form.in_format(storage)
        for form in made
        for held, storage in STORAGE_CHANGES
        if {held, storage} <= set(changing) and form.storage == held and FORMATS[storage].is_flat
    }
    return {
        str(form)
        for form in between
        if may_have(graph, name, str(form))
        and any((form.storage, other.storage) in STORAGE_CHANGES for other in read if other.layout == form.layout)
    }
