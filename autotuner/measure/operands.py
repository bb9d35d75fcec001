"""Operands made up for measuring: values drawn from a seed, and tensors that hold them in a candidate's forms."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from autotuner.errors import KernelError
from autotuner.ir.form import Form, Stored
from autotuner.ir.kinds import KINDS
from autotuner.ir.programmed import FLAG, PROGRAMMED, programmed
from autotuner.ir.programmed import ranges as program_ranges
from autotuner.ir.records import Call, Node, Subgraph, TensorType
from autotuner.kernels.registry import load
from autotuner.kernels.rules.elementwise import dropout_masks
from autotuner.kernels.torch.formats import decoded, encoded, made_up_seed

Boundary = Sequence[tuple[int, Form]]
Operands = list[Tensor | None]
CPU = torch.device("cpu")


def dtype_of(name: str) -> torch.dtype:
    """Return torch's element type of that name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise KernelError(f"torch has no element type {name!r}")
    return found


def stored(tensor: TensorType, form: Form) -> Stored:
    """Return what memory holds of a tensor in a form."""
    return form.stored(tensor.dtype, tensor.axes, tensor.extents)


class Values:
    """Values of the inputs of a subgraph, the same for all its candidates: declared axis order, dense.

    Normal random numbers; a dropout mask is boolean and keeps with 1 - p, and where a seed is asked for, a seed of
    another one; an input with a range that its operator's kind declares is uniform in it, and one with as many places
    as elements holds each of them once; the seed of all this is the subgraph's signature, plus one that is given. They
    are drawn on the device that holds them.
    """

    def __init__(self, subgraph: Subgraph, consistent: str = "", device: torch.device = CPU, seed: int = 0) -> None:
        self.subgraph, self.consistent = subgraph, consistent
        self.drop = drop_shares(subgraph)
        self.device = device
        self._generator = torch.Generator(device).manual_seed(int(subgraph.signature[:15], 16) ^ seed)
        ranges = {node.inputs[place]: ends for node in subgraph.nodes for place, ends in _ranges(node).items()}
        self._flags = {number for node in subgraph.nodes for number in node.inputs
                       if node.kind in PROGRAMMED and ranges.get(number) == FLAG}  # fmt: skip
        self.inputs = {number: self._drawn(number, ranges.get(number)) for number in subgraph.inputs}
        if consistent:
            load(consistent)(subgraph, [self.inputs[number] for number in subgraph.inputs])

    def stored(self, number: int, form: Form) -> Tensor:
        """Return an input's values as a form holds them, axes in declared order; a raw mask carries its scale."""
        tensor, p = self.subgraph.tensors[number], self.drop.get(number)
        return encoded(self.inputs[number], form, tensor, p, made_up_seed(self.subgraph, number))

    def scaled(self, number: int, keeps: Tensor) -> Tensor:
        """Return a mask of booleans as a raw one."""
        return keeps.to(dtype_of(self.subgraph.tensors[number].dtype)).mul_(1 / (1 - self.drop[number]))

    def meant(self, number: int, form: Form) -> Tensor:
        """Return what an input's values in a form stand for: as `stored`, a flat mask as booleans."""
        return decoded(self.stored(number, form), form, self.subgraph.tensors[number], self.drop.get(number))

    def _drawn(self, number: int, ends: tuple[float, float] | None) -> Tensor:
        tensor = self.subgraph.tensors[number]
        drawn: dict[str, Any] = {"generator": self._generator, "device": self.device}
        if number in self.drop:
            return torch.rand(tensor.extents, **drawn) >= self.drop[number]
        dtype = dtype_of(tensor.dtype)
        if dtype == torch.bool:
            return torch.rand(tensor.extents, **drawn) < 0.5
        if not dtype.is_floating_point:
            raise KernelError(f"no values can be made up for a {tensor.dtype} tensor: floating point or bool only")
        if number in self._flags:
            return (torch.rand(tensor.extents, **drawn) < 0.5).to(dtype)
        if ends == (0.0, prod(tensor.extents)):  # an order: each place once
            return torch.randperm(prod(tensor.extents), **drawn).reshape(tensor.extents).to(dtype)
        if ends is not None:
            return torch.rand(tensor.extents, **drawn).mul_(ends[1] - ends[0]).add_(ends[0]).to(dtype)
        return torch.randn(tensor.extents, dtype=torch.float32, **drawn).to(dtype)


def _ranges(node: Node) -> Mapping[int, tuple[float, float]]:
    """Return from and to of the values of an operator's inputs, by place; of a mask of ones and zeros, 0 and 1."""
    if node.kind in PROGRAMMED:
        return program_ranges(programmed(node.kind, node.attributes))
    return KINDS[node.kind].ranges_of(len(node.inputs)) if node.kind in KINDS else {}


def drop_shares(subgraph: Subgraph) -> dict[int, float]:
    """Return p of each dropout mask, by tensor number."""
    shares: dict[int, float] = {}
    masks = dropout_masks(subgraph)
    for node in subgraph.nodes:
        if "p" in dict(node.attributes):
            for number in masks.intersection(node.inputs + node.outputs):
                shares[number] = float(dict(node.attributes)["p"])
    return shares


def stacks(boundary: Boundary, tensors: Sequence[TensorType]) -> list[list[int]]:
    """Group the places of boundary tensors (of one side) that share a buffer.

    Slices of one stack do: same layout, storage, count and type; a slice joins the first such group that lacks its
    index. A tensor that is no slice stands alone.
    """
    groups: list[list[int]] = []
    known: dict[tuple[object, ...], list[tuple[set[int], list[int]]]] = {}
    for place, (number, form) in enumerate(boundary):
        if form.stack is None:
            groups.append([place])
            continue
        alike = known.setdefault((form.layout, form.storage, form.stack.count, tensors[number]), [])
        taken, group = next((g for g in alike if form.stack.index not in g[0]), (set[int](), list[int]()))
        if not group:
            alike.append((taken, group))
            groups.append(group)
        taken.add(form.stack.index)
        group.append(place)
    return groups


@dataclass(frozen=True)
class SharedBuffer:
    """One allocation and the boundary tensors that are views of it."""

    whole: Tensor
    views: tuple[Tensor, ...]


def placed(boundary: Boundary, tensors: Sequence[TensorType], device: torch.device = CPU) -> SharedBuffer:
    """Allocate one buffer, of zeros, and place in it the tensors of one group of `stacks`."""
    number, form = boundary[0]
    first = stored(tensors[number], form)
    whole = torch.zeros(first.length, dtype=dtype_of(first.dtype), device=device)
    lies = [stored(tensors[number], form) for number, form in boundary]
    return SharedBuffer(whole, tuple(whole.as_strided(each.extents, each.strides, each.offset) for each in lies))


@dataclass(frozen=True)
class BoundarySide:
    """One side of a call's boundary: how many tensors it has, and those that are present, by shared buffer.

    `groups` holds places, what lies there, and the key that equal groups of other candidates have as well.
    """

    name: str
    count: int
    groups: tuple[tuple[list[int], Boundary, tuple[object, ...]], ...]


def side_of(call: Call, name: str, numbers: Sequence[int], forms: Sequence[Form]) -> BoundarySide:
    """Return one side of a call's boundary, "input" or "output"."""
    boundary = tuple(zip(numbers, forms, strict=True))
    places = [place for place, (_, form) in enumerate(boundary) if not form.is_absent]
    present = [boundary[place] for place in places]
    groups = []
    for group in stacks(present, call.subgraph.tensors):
        members = [present[place] for place in group]
        groups.append(([places[place] for place in group], members, tuple((n, str(form)) for n, form in members)))
    return BoundarySide(name, len(boundary), tuple(groups))


class Buffers:
    """Operand sets of one subgraph's candidates. Candidates that agree on a form share the tensors that have it."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device
        self._held: dict[tuple[object, ...], SharedBuffer] = {}
        self.held_bytes = 0

    def clear(self) -> None:
        self._held.clear()
        self.held_bytes = 0

    def sets(self, call: Call, values: Values, count: int) -> Iterator[tuple[Operands, Operands]]:
        """Yield inputs, filled, and outputs, touched but not meaningful, of operand sets; None for an absent tensor."""
        forms, split = call.candidate.parsed_forms(), len(call.subgraph.inputs)
        inputs = side_of(call, "input", call.subgraph.inputs, forms[:split])
        outputs = side_of(call, "output", call.subgraph.outputs, forms[split:])
        for index in range(count):
            yield self._side(inputs, values, index), self._side(outputs, values, index)

    def inputs(self, call: Call, values: Values, index: int) -> Operands:
        """Return filled inputs of operand set `index`, None for an absent one."""
        forms = call.candidate.parsed_forms()[: len(call.subgraph.inputs)]
        return self._side(side_of(call, "input", call.subgraph.inputs, forms), values, index)

    def outputs(self, call: Call, values: Values, index: int) -> Operands:
        """Return outputs of operand set `index`, touched but not meaningful, None for an absent one."""
        forms = call.candidate.parsed_forms()[len(call.subgraph.inputs) :]
        return self._side(side_of(call, "output", call.subgraph.outputs, forms), values, index)

    def _side(self, side: BoundarySide, values: Values, index: int) -> Operands:
        found: Operands = [None] * side.count
        for places, members, forms in side.groups:
            key = (values.subgraph.signature, values.consistent, side.name, forms, index)
            if key not in self._held:
                self._held[key] = self._made(members, values, fill=side.name == "input")
            for place, view in zip(places, self._held[key].views, strict=True):
                found[place] = view
        return found

    def _made(self, members: Boundary, values: Values, fill: bool) -> SharedBuffer:
        buffer = placed(members, values.subgraph.tensors, self._device)
        if fill:
            for (number, form), view in zip(members, buffer.views, strict=True):
                view.copy_(values.stored(number, form))
        self.held_bytes += buffer.whole.nbytes
        return buffer


def boundary_bytes(call: Call) -> int:
    """Return the bytes of one operand set, each tensor counted without the rest of its stack."""
    total = 0
    for number, form in zip(call.subgraph.boundary, call.candidate.parsed_forms(), strict=True):
        if not form.is_absent:
            lies = stored(call.subgraph.tensors[number], form)
            total += prod(lies.extents) * dtype_of(lies.dtype).itemsize
    return total
