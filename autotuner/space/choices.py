"""Search space of a graph: choices, conversions, and the calls that they execute."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from autotuner.ir.graph import Graph
from autotuner.ir.records import Call, Candidate
from autotuner.space.cells import Cell, without_params
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
            replace(place, candidate=replace(place.candidate, params=call.candidate.params), call=call)
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
