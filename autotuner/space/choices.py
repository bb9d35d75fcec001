"""What a space consists of: choices, conversions, and the calls that they execute."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autotuner.fusion import Cover
from autotuner.graph import Graph
from autotuner.records import Call, Candidate


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
