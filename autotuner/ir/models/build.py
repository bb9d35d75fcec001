"""From the content of a model file, with extents and options chosen, to the forward graph."""

import math
from collections.abc import Mapping
from dataclasses import replace

from autotuner.errors import GraphError, ModelError
from autotuner.ir.graph import Graph, Operator, Role, Tensor
from autotuner.ir.kinds import KINDS, products_of, types_made
from autotuner.ir.models.bounds import check_axes, check_count, check_extents
from autotuner.ir.models.schema import Definition, InverseSqrt, OperatorEntry, axes_of
from autotuner.ir.operator_checks import check_operator
from autotuner.ir.records import Attributes, Scalar


def build_graph(
    definition: Definition,
    *,
    name: str,
    extents: Mapping[str, int],
    options: Mapping[str, Scalar],
    dtype: str,
    origin: str,
) -> Graph:
    """Return the forward graph.

    Raises:
        ModelError: an operator contradicts its kind, its tensors or the options; the message starts with `origin`.
    """
    building = _Building(definition, dict(extents), options, dtype)
    try:
        check_count(definition.operators)
        for entry in definition.operators:
            building.append(entry)
        outputs = tuple(building.resolved(output) for output in definition.outputs)
        graph = Graph(name, building.extents, building.tensors, tuple(building.operators), outputs)
        for tensor in (t for t in graph.tensors.values() if t.role == "parameter"):
            if not graph.consumers[tensor.name]:
                raise GraphError(f"parameter {tensor.name!r} is read by no operator")
        check_extents(graph)
    except GraphError as error:
        raise ModelError(f"{origin}: {error}") from None
    return graph


class _Building:
    """The forward graph in the making."""

    def __init__(
        self, definition: Definition, extents: dict[str, int], options: Mapping[str, Scalar], dtype: str
    ) -> None:
        self.extents = extents
        self.options = options
        self.dtype = dtype
        self.tensors: dict[str, Tensor] = {}
        self.operators: list[Operator] = []
        self._stands_for: dict[str, str] = {}
        for name, given in definition.inputs.items():
            if self._present(given.when, f"input {name!r}"):
                own = given.dtype or dtype
                self.tensors[name] = Tensor(name, given.axes, own, "input", constant=given.requires_grad is False)
        for name, entry in definition.parameters.items():
            own = dtype if isinstance(entry, str) else entry.dtype
            self.tensors[name] = Tensor(name, axes_of(entry), own, "parameter")

    def append(self, entry: OperatorEntry) -> None:
        """Add an operator and its outputs, or let it vanish."""
        where = f"operator {entry.name!r}"
        kind = entry.kind
        if kind.startswith("$"):
            kind = str(self._option(kind, where))
        attributes = self._attributes(entry, kind)
        drops_nothing = kind in ("dropout", "dropout_mask") and dict(attributes).get("p") == 0
        if drops_nothing or not self._present(entry.when, where):
            if entry.inputs:
                self._stands_for[entry.outputs[0]] = self.resolved(entry.inputs[0])
            return
        inputs = tuple(self.resolved(tensor) for tensor in entry.inputs)
        operator = Operator(entry.name, kind, entry.spec, inputs, tuple(entry.outputs), attributes)
        check_operator(operator)
        check_axes(operator)
        for tensor in inputs:
            if tensor not in self.tensors:
                raise GraphError(f"{where} reads {tensor!r}, which is no input, no parameter and made by no operator "
                                 "before it")  # fmt: skip
        if kind == "dropout":
            self._check_probability(operator)
            self._give_type_to_mask(operator)
        self._infer_extents(operator)
        self._add_outputs(operator)
        self.operators.append(operator)

    def resolved(self, tensor: str) -> str:
        """Return the tensor that stands for one whose operator vanished, or the tensor itself."""
        return self._stands_for.get(tensor, tensor)

    def _option(self, reference: str, where: str) -> Scalar:
        name = reference.removeprefix("$")
        if name not in self.options:
            raise GraphError(f"{where}: no option {name!r}; known: {', '.join(sorted(self.options)) or 'none'}")
        return self.options[name]

    def _present(self, when: str | None, where: str) -> bool:
        value = True if when is None else self._option(when, where)
        if not isinstance(value, bool):
            raise GraphError(f"{where}: `when` needs an option that is true or false; {when} is {value!r}")
        return value

    def _attributes(self, entry: OperatorEntry, kind: str) -> Attributes:
        """Return attributes with options and axes looked up, integers as floats where the kind wants floats."""
        found: list[tuple[str, Scalar]] = []
        where = f"operator {entry.name!r}"
        for name, value in sorted(entry.attributes.items()):
            scalar: Scalar
            if isinstance(value, InverseSqrt):
                if value.inverse_sqrt not in self.extents:
                    raise GraphError(f"{where}: attribute {name}: axis {value.inverse_sqrt!r} has no extent; "
                                     f"known: {', '.join(self.extents)}")  # fmt: skip
                scalar = 1 / math.sqrt(self.extents[value.inverse_sqrt])
            else:
                scalar = self._option(value, where) if isinstance(value, str) and value.startswith("$") else value
            wants_float = kind in KINDS and KINDS[kind].attributes.get(name) is float
            found.append((name, float(scalar) if wants_float and type(scalar) is int else scalar))
        return tuple(found)

    def _check_probability(self, operator: Operator) -> None:
        drawn = [o for o in self.operators if operator.inputs[1] in o.outputs and o.kind == "dropout_mask"]
        if drawn and drawn[0].attribute("p") != operator.attribute("p"):
            raise GraphError(
                f"operator {operator.name!r}: p is {operator.attribute('p')}, that of its mask {operator.inputs[1]!r} "
                f"{drawn[0].attribute('p')}; they must be equal"
            )

    def _give_type_to_mask(self, operator: Operator) -> None:
        """Give a mask that is drawn the type of what it is multiplied with."""
        x, mask = (self.tensors[tensor] for tensor in operator.inputs)
        if mask.role == "auxiliary" and not any(mask.name in o.inputs for o in self.operators):
            self.tensors[mask.name] = replace(mask, dtype=x.dtype)

    def _infer_extents(self, operator: Operator) -> None:
        """Give each axis that the operator's outputs introduce the extent that its inputs bind to it."""
        bound: dict[str, int] = {}
        for tensor, axes in zip(operator.inputs, operator.input_axes, strict=True):
            own = self.tensors[tensor].axes
            if len(axes) != len(own):
                raise GraphError(
                    f"operator {operator.name!r}: spec {operator.spec!r} gives tensor {tensor!r} the axes {axes!r}; "
                    f"it has {len(own)}: {own!r}"
                )
            for letter, axis in zip(axes, own, strict=True):
                if bound.setdefault(letter, self.extents[axis]) != self.extents[axis]:
                    raise GraphError(
                        f"operator {operator.name!r}: spec {operator.spec!r} binds {letter!r} to {bound[letter]} and, "
                        f"at tensor {tensor!r}, to {self.extents[axis]}"
                    )
        for letter in "".join(operator.output_axes):
            if letter not in bound and letter not in self.extents:
                raise GraphError(
                    f"operator {operator.name!r}: axis {letter!r} of spec {operator.spec!r} has no extent; "
                    f"known: {', '.join(self.extents)}"
                )
            extent = bound.get(letter, self.extents.get(letter, 0))
            if self.extents.setdefault(letter, extent) != extent:
                raise GraphError(
                    f"operator {operator.name!r}: axis {letter!r} of spec {operator.spec!r} is {extent} in its inputs "
                    f"and {self.extents[letter]} elsewhere in the model; give one of them another letter"
                )

    def _add_outputs(self, operator: Operator) -> None:
        given = [self.tensors[tensor].dtype for tensor in operator.inputs]
        dtypes = types_made(operator, given) if given else (self.dtype,) * len(operator.outputs)
        products = products_of(operator)
        for tensor, axes, product, dtype in zip(operator.outputs, operator.output_axes, products, dtypes, strict=True):
            if tensor in self.tensors:
                raise GraphError(f"operator {operator.name!r} makes {tensor!r}, which exists already")
            role: Role = "activation" if product == "value" else "auxiliary"
            self.tensors[tensor] = Tensor(tensor, axes, dtype, role, optional=product.startswith("optional"))
