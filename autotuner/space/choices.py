"""Search space of a graph: choices, conversions, sampled cells, and the calls that they execute."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product

from autotuner.checkpoint import checkpoint
from autotuner.ir.form import Form
from autotuner.ir.graph import Graph
from autotuner.ir.records import Attributes, Call, Candidate, Scalar
from autotuner.kernels import KERNELS
from autotuner.space.fusion import Cover


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
class Cell:
    """One kernel on operands in the same forms, with every combination of launch parameters that it admits.

    Args:
        call: any of them, without its parameters: subgraph, kernel and forms.
        lists: the values of each parameter, which multiply out.
        trials: how many combinations are tried at most, where not all are.
    """

    call: Call
    lists: tuple[tuple[str, tuple[Scalar, ...]], ...]
    trials: int

    @property
    def key(self) -> str:
        return self.call.key

    @property
    def kernel(self) -> str:
        return self.call.candidate.kernel

    def called(self, params: Attributes) -> Call:
        """Return the call with these parameters."""
        return Call(self.call.subgraph, self.call.candidate.with_params(params))

    def admits(self, params: Attributes) -> bool:
        """Tell whether the kernel can run with these parameters."""
        candidate = self.call.candidate.with_params(params)
        return KERNELS[self.kernel].refuses(self.call.subgraph, candidate) is None

    def exceeds(self, combinations: int) -> bool:
        """Tell whether the kernel admits more combinations than this; asks it no further than needed."""
        return sum(1 for _ in islice(self._admitted(), combinations + 1)) > combinations

    @cached_property
    def combinations(self) -> tuple[Attributes, ...]:
        """Every combination that the kernel admits, in the order of the lists."""
        return tuple(self._admitted())

    @cached_property
    def starts(self) -> tuple[Attributes, ...]:
        """The combinations to begin with: the first, last and middle value of every list, as far as admitted.

        Where none of the three is, the first combination that is.
        """
        places = (lambda _: 0, lambda count: count - 1, lambda count: count // 2)
        found = (tuple((name, values[place(len(values))]) for name, values in self.lists) for place in places)
        admitted = tuple(params for params in dict.fromkeys(found) if self.admits(params))
        return admitted or tuple(islice(self._admitted(), 1))

    def _admitted(self) -> Iterator[Attributes]:
        return (params for params in multiplied(self.lists) if self.admits(params))


@dataclass(frozen=True)
class Space:
    """Everything that could compute a graph: choices per cover, and conversions between forms of a tensor.

    Of a sampled cell the space holds some choices only: at first those to start with, later those that were tried.
    """

    graph: Graph
    choices: tuple[Choice, ...]
    conversions: tuple[Conversion, ...]
    given: Mapping[str, tuple[str, ...]]
    """For tensors from outside and for outputs: the forms that they may have there."""
    cells: tuple[Cell, ...] = ()
    """The sampled ones: with more combinations of launch parameters than are all tried."""
    device_type: str = "cpu"

    @cached_property
    def exact(self) -> "Space":
        """The space without conversions to and from formats that are not exact; itself where there are none."""
        kept = tuple(each for each in self.conversions if not self._is_narrow(each))
        return self if len(kept) == len(self.conversions) else replace(self, conversions=kept)

    @cached_property
    def narrow_calls(self) -> frozenset[str]:
        """Keys of the conversions to and from formats that are not exact."""
        return frozenset(each.call.key for each in self.conversions if self._is_narrow(each))

    @staticmethod
    def _is_narrow(conversion: Conversion) -> bool:
        return any(Form.parse(text).format.numerics != "exact" for text in (conversion.source, conversion.target))

    @cached_property
    def calls(self) -> dict[str, Call]:
        """Distinct calls by key: what there is to measure."""
        calls = {choice.call.key: choice.call for choice in self.choices}
        return calls | {conversion.call.key: conversion.call for conversion in self.conversions}

    def with_calls(self, calls: Iterable[Call]) -> "Space":
        """Return the space with more calls of its sampled cells, wherever a cell computes something.

        Raises:
            KeyError: a call is of no sampled cell.
        """
        more = {call.key: call for call in calls if call.key not in self.calls}
        choices = tuple(
            replace(place, candidate=place.candidate.with_params(call.candidate.params), call=call)
            for call in more.values()
            for place in self._places[without_params(call).key]
        )
        return replace(self, choices=self.choices + choices) if choices else self

    @cached_property
    def _places(self) -> dict[str, tuple[Choice, ...]]:
        """For each sampled cell, by key: one choice for each cover and forms that it serves."""
        kernels = {cell.kernel for cell in self.cells}
        found: dict[str, dict[object, Choice]] = {cell.key: {} for cell in self.cells}
        for choice in self.choices:
            if choice.candidate.kernel in kernels:
                places = found.get(without_params(choice.call).key)
                if places is not None:
                    places.setdefault((choice.cover, choice.forms, choice.candidate.forms), choice)
        return {key: tuple(places.values()) for key, places in found.items()}


def multiplied(lists: tuple[tuple[str, tuple[Scalar, ...]], ...]) -> Iterator[Attributes]:
    """Yield every combination of parameters; the last list varies fastest."""
    names = tuple(name for name, _ in lists)
    for values in product(*(values for _, values in lists)):
        checkpoint()
        yield tuple(zip(names, values, strict=True))


def without_params(call: Call) -> Call:
    """Return a call without its launch parameters, whose key is that of its cell."""
    return Call(call.subgraph, call.candidate.with_params(())) if call.candidate.params else call
