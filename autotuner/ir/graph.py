"""Operators, tensors, and the dataflow graph: values only, checked when they are made."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from autotuner.errors import GraphError
from autotuner.ir.records import LETTERS, Attributes, Node, Scalar, Subgraph, TensorType, names_axis

Role = Literal["input", "parameter", "activation", "auxiliary", "gradient"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the graph: declared axes in order, one letter each, and element type.

    Roles: `input` and `parameter` come from outside; `activation` flows on; `auxiliary` is what forward leaves for
    backward alone (a mask, mean and reciprocal deviation, log-sum-exp); `gradient` is what backward computes.
    An `optional` tensor may stay absent: only some kernels make it, and only some read it.
    A `constant` one comes from outside and needs no gradient: data, or a frozen parameter.
    """

    name: str
    axes: str
    dtype: str
    role: Role
    optional: bool = False
    constant: bool = False


@dataclass(frozen=True)
class Operator:
    """A node of the graph: kind, einsum spec and operands.

    The spec binds its own letters to each operand's axes by place, so that one tensor can be read as "blh" by one
    operator and as "bkh" by another.
    """

    name: str
    kind: str
    spec: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Attributes = ()
    phase: Literal["forward", "backward"] = "forward"

    def __post_init__(self) -> None:
        if self.spec.count("->") != 1:
            raise GraphError(f'operator {self.name!r}: {self.spec!r} is no spec: write it like "blh,nph->blnp"')
        for side, tensors, word in (
            (self.input_axes, self.inputs, "inputs"),
            (self.output_axes, self.outputs, "outputs"),
        ):
            if len(side) != len(tensors):
                raise GraphError(
                    f"operator {self.name!r}: spec {self.spec!r} has {len(side)} {word}, the operator {len(tensors)}"
                )

    @property
    def input_axes(self) -> tuple[str, ...]:
        text = self.spec.split("->")[0]
        return tuple(text.split(",")) if self.inputs or text else ()

    @property
    def output_axes(self) -> tuple[str, ...]:
        text = self.spec.split("->")[1]
        return tuple(text.split(",")) if self.outputs or text else ()

    @property
    def operands(self) -> tuple[tuple[str, str], ...]:
        """(tensor name, axes as the spec binds them) for inputs, then outputs."""
        return tuple(zip(self.inputs + self.outputs, self.input_axes + self.output_axes, strict=True))

    def attribute(self, name: str) -> Scalar:
        return dict(self.attributes)[name]


@dataclass(frozen=True)
class Graph:
    """Operators in an order in which they can run, over named tensors.

    Args:
        name: model and preset, for people.
        extents: elements along each axis letter of the tensors.
        tensors: by name.
        operators: each input is from outside or an output of an earlier operator.
        outputs: tensors that the caller gets (the model's outputs; in a training graph the gradients as well).
    """

    name: str
    extents: Mapping[str, int]
    tensors: Mapping[str, Tensor]
    operators: tuple[Operator, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        made: set[str] = {t.name for t in self.tensors.values() if t.role in ("input", "parameter")}
        made |= set(self.given_gradients)
        names: set[str] = set()
        for operator in self.operators:
            if operator.name in names:
                raise GraphError(f"operator {operator.name!r} occurs twice")
            names.add(operator.name)
            for tensor, axes in operator.operands:
                if tensor not in self.tensors:
                    raise GraphError(f"operator {operator.name!r} names tensor {tensor!r}, which the graph lacks")
                if len(axes) != len(self.tensors[tensor].axes):
                    raise GraphError(
                        f"operator {operator.name!r}: spec {operator.spec!r} gives tensor {tensor!r} the axes "
                        f"{axes!r}; it has {len(self.tensors[tensor].axes)}: {self.tensors[tensor].axes!r}"
                    )
            for tensor in operator.inputs:
                if tensor not in made and not self.tensors[tensor].optional:
                    raise GraphError(f"operator {operator.name!r} reads {tensor!r} before any operator made it")
            for tensor in operator.outputs:
                if tensor in made:
                    raise GraphError(f"operator {operator.name!r} makes {tensor!r}, which exists already")
                made.add(tensor)
            self.letters(operator)
        missing = set(self.outputs) - made
        if missing:
            raise GraphError(f"the graph's outputs {sorted(missing)} are made by no operator")

    @cached_property
    def given_gradients(self) -> tuple[str, ...]:
        """Gradients that come from outside: those that no operator makes."""
        made = {name for operator in self.operators for name in operator.outputs}
        return tuple(t.name for t in self.tensors.values() if t.role == "gradient" and t.name not in made)

    @cached_property
    def producers(self) -> dict[str, Operator]:
        return {tensor: operator for operator in self.operators for tensor in operator.outputs}

    @cached_property
    def consumers(self) -> dict[str, tuple[Operator, ...]]:
        found: dict[str, list[Operator]] = {name: [] for name in self.tensors}
        for operator in self.operators:
            for tensor in dict.fromkeys(operator.inputs):
                found[tensor].append(operator)
        return {name: tuple(operators) for name, operators in found.items()}

    @cached_property
    def saved(self) -> tuple[str, ...]:
        """Tensors that forward leaves for backward: made or given in forward, read in backward."""
        return tuple(
            name
            for name, tensor in self.tensors.items()
            if tensor.role != "gradient" and any(o.phase == "backward" for o in self.consumers[name])
            and (name not in self.producers or self.producers[name].phase == "forward")
        )  # fmt: skip

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return elements along each declared axis of a tensor."""
        axes = self.tensors[tensor].axes
        unknown = [axis for axis in axes if axis not in self.extents]
        if unknown:
            known = dict(self.extents)
            raise GraphError(f"tensor {tensor!r} has axis {unknown[0]!r} without an extent; known: {known}")
        return tuple(self.extents[axis] for axis in axes)

    def elements(self, tensor: str) -> int:
        return prod(self.shape(tensor))

    def letters(self, operator: Operator) -> dict[str, int]:
        """Return elements along each letter of an operator's spec.

        Raises:
            GraphError: two operands bind one letter to different extents.
        """
        bound: dict[str, int] = {}
        for tensor, axes in operator.operands:
            for letter, extent in zip(axes, self.shape(tensor), strict=True):
                if bound.setdefault(letter, extent) != extent:
                    raise GraphError(
                        f"operator {operator.name!r}: spec {operator.spec!r} binds {letter!r} to {bound[letter]} "
                        f"and, at tensor {tensor!r}, to {extent}"
                    )
        return bound

    def is_weight(self, tensor: str) -> bool:
        """Tell whether a tensor is a parameter, or a cast of one."""
        made_by = self.producers.get(tensor)
        if made_by is not None and made_by.kind == "cast":
            return self.is_weight(made_by.inputs[0])
        return self.tensors[tensor].role == "parameter"

    def subgraph(self, operators: Iterable[Operator], inputs: Iterable[str], outputs: Iterable[str]) -> Subgraph:
        """Return the name-free record of some operators, given in graph order, with the stated boundary.

        Letters of each spec are renamed in order of appearance and tensors are numbered: boundary inputs first,
        then boundary outputs, then what stays inside.
        """
        members, inputs, outputs = tuple(operators), tuple(inputs), tuple(outputs)
        inside = (t for o in members for t in o.inputs + o.outputs)
        numbers = {name: i for i, name in enumerate(dict.fromkeys((*inputs, *outputs, *inside)))}
        nodes = tuple(
            nameless(o, tuple(numbers[t] for t in o.inputs), tuple(numbers[t] for t in o.outputs)) for o in members
        )
        tensors = tuple(TensorType(self.shape(name), self.tensors[name].dtype) for name in numbers)
        return Subgraph(nodes, tensors, tuple(numbers[t] for t in inputs), tuple(numbers[t] for t in outputs))

    @cached_property
    def key(self) -> str:
        """Key of the whole graph: its name-free record, so that neither names nor the order of tensors change it."""
        read = dict.fromkeys(name for operator in self.operators for name in operator.inputs)
        given = [name for name in read if name not in self.producers]
        return self.subgraph(self.operators, given, self.outputs).signature


def nameless(operator: Operator, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Node:
    """Return an operator's record over numbered tensors, letters renamed in order of appearance."""
    renaming: dict[int, int] = {}
    for letter in operator.spec:
        if letter.isalpha() and ord(letter) not in renaming:
            renaming[ord(letter)] = ord(LETTERS[len(renaming)])
    attributes = tuple(
        (name, value.translate(renaming) if names_axis(name) and isinstance(value, str) else value)
        for name, value in operator.attributes
    )
    return Node(operator.kind, operator.spec.translate(renaming), inputs, outputs, attributes)
