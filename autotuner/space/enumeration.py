"""Enumeration of a graph's choices from covers and kernels' rules, and the largest size of a space."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import TypeVar

from autotuner.checkpoint import checkpoint
from autotuner.errors import SpaceError
from autotuner.ir.form import STACK_AXIS, Form, local_form
from autotuner.ir.graph import Graph
from autotuner.ir.numerics import Numerics
from autotuner.ir.records import LETTERS, Call, Candidate, Scalar, Subgraph
from autotuner.kernels import KERNELS, Kernel
from autotuner.kernels.canonical import canonical
from autotuner.space.choices import Cell, Choice, multiplied, without_params
from autotuner.space.files import KernelEntry, SpaceFile
from autotuner.space.fusion import Cover

COVERS_MAX = 10_000
"""24 encoder layers written out have 2,700; which two exclude each other is asked of every pair."""

LOOKED_MAX = 1_000_000
"""Combinations of forms that are looked at, admitted or not: 24 encoder layers have 180,000 on a CUDA device."""

KEPT_MAX = 250_000
"""Choices and conversions together, of 3 kB each: 24 encoder layers have 130,000 on a CUDA device."""

T = TypeVar("T")


class Size:
    """Counts what is found of a graph's space, and refuses more than can be kept or looked at.

    Args:
        name: of the graph, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._looked = self._kept = 0

    def look(self) -> None:
        """Count one combination of forms.

        Raises:
            SpaceError: there are too many.
        """
        checkpoint()
        self._looked += 1
        if self._looked > LOOKED_MAX:
            raise self._too_large(LOOKED_MAX, "combinations of forms to look at")

    def kept(self, found: Iterable[T]) -> list[T]:
        """Return choices or conversions as a list.

        Raises:
            SpaceError: with those before, there are too many.
        """
        kept = []
        for each in found:
            checkpoint()
            self._kept += 1
            if self._kept > KEPT_MAX:
                raise self._too_large(KEPT_MAX, "choices and conversions")
            kept.append(each)
        return kept

    def covers(self, found: Iterable[T]) -> tuple[T, ...]:
        """Return covers as a tuple.

        Raises:
            SpaceError: there are too many.
        """
        covers = tuple(found)
        if len(covers) > COVERS_MAX:
            raise self._too_large(COVERS_MAX, "sets of operators that one kernel could compute")
        return covers

    def _too_large(self, most: int, what: str) -> SpaceError:
        return SpaceError(
            f"the space of {self._name!r} is too large: it has more than {most:,} {what}; tune one of the layers that "
            "repeat, give tensors fewer axes, or a search space with fewer kernels or `layouts: declared`"
        )


class Enumeration:
    """Turns a cover and a kernel's rules into choices."""

    def __init__(
        self,
        graph: Graph,
        file: SpaceFile,
        families: tuple[tuple[str, ...], ...],
        given: Mapping[str, tuple[str, ...]],
        size: Size,
        *,
        saving: bool = False,
        numerics: Numerics = "exact",
    ) -> None:
        self.graph = graph
        self.named = {operator.name: operator for operator in graph.operators}
        self.file = file
        self.given = given
        self._size = size
        self._saving, self._numerics = saving, numerics
        self.families = families
        self.pitches = _pitches(graph, families, given)
        self._layouts: dict[tuple[str, str], list[tuple[str, ...]]] = {}
        self._called: dict[tuple[str, str, tuple[str, ...]], list[tuple[Candidate, Call]]] = {}
        self._sampled: dict[tuple[str, Candidate], Cell | None] = {}
        self._cells: dict[str, Cell] = {}

    def choices(
        self, cover: Cover, *, anchors: bool, domains: Mapping[str, set[str]] | None = None
    ) -> Iterator[Choice]:
        operators = [self.named[name] for name in cover.recomputed + cover.operators]
        subgraph = self.graph.subgraph(operators, cover.inputs, cover.outputs)
        for name in cover.kernels:
            kernel = KERNELS[name]
            if kernel.anchors != anchors or not self._is_allowed(kernel, cover):
                continue
            entry = self.file.kernels[name]
            for row in self._rows(kernel, entry, subgraph):
                for forms in self._in_graph(cover, kernel, row):
                    if domains is not None and not self._wanted(cover, forms, domains):
                        continue
                    yield from self._with_params(cover, kernel, entry, subgraph, forms)

    def _is_allowed(self, kernel: Kernel, cover: Cover) -> bool:
        """Tell whether a kernel is allowed here: one that rounds its operands, for products with weights alone.
        Gradients of weights, which are summed over many steps, stay as they are."""
        products = (self.named[name] for name in cover.operators if self.named[name].kind == "contraction")
        return kernel.needs == "exact" or all(any(map(self.graph.is_weight, each.inputs)) for each in products)

    def _rows(self, kernel: Kernel, entry: KernelEntry, subgraph: Subgraph) -> list[tuple[str, ...]]:
        key = (kernel.name, subgraph.signature)
        if key not in self._layouts:
            rows = [row for row in dict.fromkeys(kernel.layouts(subgraph)) if self._is_offered(row)]
            if entry.layouts == "declared":
                declared = tuple(subgraph.tensors[number].axes for number in subgraph.boundary)
                rows = [row for row in rows if tuple(_unstacked(text) for text in row) == declared]
            self._layouts[key] = rows
        return self._layouts[key]

    def _is_offered(self, row: tuple[str, ...]) -> bool:
        """Tell whether the search space has the storage formats of a row."""
        formats = (Form.parse(text).format for text in row)
        return all(each.is_offered(saving=self._saving, numerics=self._numerics) for each in formats)

    def _in_graph(self, cover: Cover, kernel: Kernel, row: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """Write a row in the tensors' own axes, with stack members' names, and with pitched variants; of a kernel that
        is compiled, with all operands pitched that can be, or none."""
        names = cover.inputs + cover.outputs
        texts = []
        for name, written in zip(names, row, strict=True):
            axes, letters = self._positional(name)
            text = local_form(written, letters, axes)
            form = Form.parse(text)
            if form.stack:
                texts.append(self._members(name, form))
            else:
                texts.append([text, *(self.pitches.get((name, text), ()) if kernel.pitched else ())])
        narrow = [
            (place, self.given[name])
            for place, name in enumerate(names)
            if name in self.given and len(self.graph.tensors[name].axes) <= 1
        ]
        for forms in _all_or_none(texts) if kernel.compiles and not kernel.anchors else product(*texts):
            self._size.look()
            if all(plain(forms[place]) in given for place, given in narrow) and _whole_stacks(names, forms):
                yield forms

    def _positional(self, name: str) -> tuple[str, str]:
        axes = self.graph.tensors[name].axes
        return axes, LETTERS[: len(axes)]

    def _members(self, name: str, form: Form) -> list[str]:
        """Return a slice with the names of its stack; none where what an operator reads is a slice of no stack."""
        assert form.stack is not None
        families = (f for f in self.families if len(f) == form.stack.count and f[form.stack.index] == name)
        family = next(families, None)
        stack = f"@{form.stack.index}/{form.stack.count}#"
        return [] if family is None else [f"{form.layout.axes}{stack}{'+'.join(family)}"]

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
        local = tuple(local_form(text, *self._positional(name)) for name, text in zip(names, forms, strict=True))
        key = (kernel.name, subgraph.signature, local)
        if key not in self._called:
            self._called[key] = list(self._calls(kernel, entry, subgraph, local))
        asked = tuple(plain(text) for text in forms)
        for candidate, call in self._called[key]:
            yield Choice(cover, candidate, asked, call)

    def _calls(
        self, kernel: Kernel, entry: KernelEntry, subgraph: Subgraph, local: tuple[str, ...]
    ) -> Iterator[tuple[Candidate, Call]]:
        """Yield what a kernel admits on operands in these forms; of a sampled cell, what to start with."""
        cell = self._sampled_cell(kernel, entry, subgraph, local) if entry.sampled else None
        if cell is not None:
            for params in cell.starts:
                yield Candidate(kernel.name, local, params, kernel.version), cell.called(params)
            return
        for params in multiplied(_lists(entry)):
            candidate = Candidate(kernel.name, local, params, kernel.version)
            if kernel.refuses(subgraph, candidate) is None:
                yield candidate, canonical(subgraph, candidate)

    def _sampled_cell(
        self, kernel: Kernel, entry: KernelEntry, subgraph: Subgraph, local: tuple[str, ...]
    ) -> Cell | None:
        """Return the cell of a kernel on these operands, or None where it is small enough to be enumerated.

        What is left once the first admitted combination is found is asked of the canonical call, as measuring does it:
        so that places that share a cell are not each asked for every combination.
        """
        bare = Candidate(kernel.name, local, (), kernel.version)
        key = (subgraph.signature, bare)
        if key not in self._sampled:
            self._sampled[key] = None
            candidates = (bare.with_params(params) for params in multiplied(_lists(entry)))
            if any(kernel.refuses(subgraph, candidate) is None for candidate in candidates):
                call = canonical(subgraph, bare)
                cell = self._cells.setdefault(call.key, Cell(call, _lists(entry), entry.trials))
                self._sampled[key] = cell if cell.exceeds(entry.enumerate_up_to) else None
        return self._sampled[key]

    def sampled_cells(self, choices: Iterable[Choice]) -> tuple[Cell, ...]:
        """Return the cells of which these choices are only some."""
        cells = {cell.key: cell for cell in self._sampled.values() if cell is not None}
        kernels = {cell.kernel for cell in cells.values()}
        keys = dict.fromkeys(without_params(c.call).key for c in choices if c.candidate.kernel in kernels)
        return tuple(cells[key] for key in keys if key in cells)


def _all_or_none(texts: Iterable[list[str]]) -> Iterator[tuple[str, ...]]:
    """Yield tensors' dense forms, then all that can be pitched in the widest stack: compiling takes seconds."""
    texts = list(texts)
    yield tuple(each[0] for each in texts)
    if any(len(each) > 1 for each in texts):
        yield tuple(each[min(1, len(each) - 1)] for each in texts)


def _whole_stacks(names: tuple[str, ...], forms: tuple[str, ...]) -> bool:
    """Tell whether siblings are pitched together: a slice's siblings in a row are slices of the same stack."""
    groups = {group for text in forms if (group := text.partition("#")[2])}
    if not groups:
        return True
    by_tensor = dict(zip(names, forms, strict=True))
    return all(
        by_tensor[member].endswith("#" + group)
        for group in groups
        for member in group.split("+")
        if member in by_tensor
    )


def _unstacked(text: str) -> str:
    """Return a form's order of axes, without its stack's."""
    return text.split("@")[0].split(":")[0].replace(STACK_AXIS, "")


def _lists(entry: KernelEntry) -> tuple[tuple[str, tuple[Scalar, ...]], ...]:
    return tuple((name, tuple(values)) for name, values in entry.params.items())


def plain(text: str) -> str:
    """Return a form as neighbours see it: a slice with the stacking axis outermost is an ordinary dense tensor."""
    return text.split("@")[0].removeprefix(STACK_AXIS) if text.startswith(STACK_AXIS) else text


def _pitches(
    graph: Graph, families: Iterable[tuple[str, ...]], given: Mapping[str, tuple[str, ...]]
) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return, per tensor and dense form, the forms in which it lies pitched among its siblings.

    Activations and their gradients lie as rows, stack, features. Parameters and what the caller gets are dense.
    """
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for family in families:
        for index, name in enumerate(family):
            rows = None if name in given else _rows(graph, name.removeprefix("grad_"))
            if rows:
                axes = graph.tensors[name].axes
                layout = f"{axes[:rows]}{STACK_AXIS}{axes[rows:]}@{index}/{len(family)}#{'+'.join(family)}"
                found[name, axes].append(layout)
    return {key: tuple(texts) for key, texts in found.items()}


def _rows(graph: Graph, name: str) -> int:
    """Return how many of the outer axes of a product, or of a biased one, its parameter has not; 0 where it has one of
    these, or where something else makes the tensor."""
    operator = graph.producers.get(name)
    if operator is None or operator.kind not in ("contraction", "bias"):
        return 0
    own, (made,) = operator.input_axes[1], operator.output_axes
    rows = sum(axis not in own for axis in made)
    return rows if not set(made[:rows]) & set(own) else 0


def form_domains(graph: Graph, anchored: Iterable[Choice], given: Mapping[str, tuple[str, ...]]) -> dict[str, set[str]]:
    domains: dict[str, set[str]] = {name: {tensor.axes, *given.get(name, ())} for name, tensor in graph.tensors.items()}
    for choice in anchored:
        for name, text in choice.by_tensor.items():
            domains[name].add(text)
    return domains
