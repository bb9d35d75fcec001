"""Options of a problem: choices per operator, conversions, and what backward may repeat."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autotuner.ir.cost import form_bytes
from autotuner.ir.graph import Graph, Operator
from autotuner.ir.kinds import draws
from autotuner.solve.problem.factors import State
from autotuner.space import Choice, Conversion, Space
from autotuner.space.fusion import Cover

Place = tuple[str, str, str]
"""A tensor, the form that it is converted from, and the one that it is converted into."""

Stated = Sequence[tuple[State, Choice]]


@dataclass(frozen=True)
class Offered:
    """A choice of each cover and forms, and a conversion of each place.

    Args:
        saving: whether backward may also repeat forward operators, to save what they make.
    """

    space: Space
    choices: Mapping[State, Choice]
    conversions: Mapping[Place, Conversion]
    saving: bool

    def is_alike(self, other: "Offered") -> bool:
        """Tell whether another of the same space has the same states, in the same order, and the same places."""

        def shape(offered: Offered) -> list[tuple[State, Cover, tuple[str, ...]]]:
            return [(state, choice.cover, choice.candidate.forms) for state, choice in offered.choices.items()]

        return self.conversions.keys() == other.conversions.keys() and shape(self) == shape(other)

    @property
    def graph(self) -> Graph:
        return self.space.graph

    @cached_property
    def by_operator(self) -> Mapping[str, Stated]:
        found: dict[str, list[tuple[State, Choice]]] = {operator.name: [] for operator in self.graph.operators}
        for state, choice in self.choices.items():
            for name in choice.cover.operators:
                found[name].append((state, choice))
        return found

    @cached_property
    def operators(self) -> Mapping[str, Operator]:
        return {operator.name: operator for operator in self.graph.operators}

    @cached_property
    def targets(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        """The forms that a tensor in some form can be converted into."""
        found: dict[tuple[str, str], list[str]] = defaultdict(list)
        for tensor, source, target in self.conversions:
            found[tensor, source].append(target)
        return {key: tuple(sorted(forms)) for key, forms in found.items()}

    @cached_property
    def late_readers(self) -> Mapping[str, Mapping[str, None]]:
        """The forms in which backward reads each tensor that forward makes or gets."""
        found: dict[str, dict[str, None]] = defaultdict(dict)
        for choice in self.choices.values():
            if self.is_backward(choice):
                for tensor in choice.cover.inputs:
                    if self.is_forward(tensor):
                        found[tensor][choice.by_tensor[tensor]] = None
        if self.saving:
            for name in reversed([o.name for o in self.graph.operators if repeatable(self.graph, o)]):
                if any(tensor in found for tensor in self.operators[name].outputs):
                    for _, choice in self._alone(name):
                        for tensor in choice.cover.inputs:
                            if self.is_forward(tensor):
                                found[tensor][choice.by_tensor[tensor]] = None
        return found

    @cached_property
    def repeated(self) -> Mapping[str, Stated]:
        """Forward operators that backward may repeat, because something there reads what they make."""
        return {
            operator.name: self._alone(operator.name)
            for operator in self.graph.operators
            if self.saving
            and repeatable(self.graph, operator)
            and any(tensor in self.late_readers for tensor in operator.outputs)
        }

    @cached_property
    def remade(self) -> Mapping[str, Sequence[tuple[str, str]]]:
        """By forward tensor: which covers of backward make it again beside their own work, by the first operator of
        each, and in which form."""
        found: dict[str, dict[tuple[str, str], None]] = defaultdict(dict)
        for choice in self.choices.values():
            for tensor in choice.cover.remade:
                found[tensor][choice.cover.operators[0], choice.by_tensor[tensor]] = None
        return {tensor: tuple(ways) for tensor, ways in found.items()}

    def _alone(self, name: str) -> Stated:
        return [
            (state, choice)
            for state, choice in self.by_operator[name]
            if choice.cover.operators == (name,) and not any("@" in form for form in choice.candidate.forms)
        ]

    def is_backward(self, choice: Choice) -> bool:
        return self.operators[choice.cover.operators[0]].phase == "backward"

    def is_forward(self, tensor: str) -> bool:
        """Tell whether a tensor is made in forward, or is an input of the model."""
        producer = self.graph.producers.get(tensor)
        if producer is None:
            return self.graph.tensors[tensor].role == "input"
        return producer.phase == "forward"

    def bytes_of(self, tensor: str, form: str) -> int:
        return form_bytes(self.graph, tensor, form)


def state_of(choice: Choice) -> State:
    cover = choice.cover
    return f"{'+'.join(cover.operators)}|{','.join(cover.inputs)}->{','.join(cover.outputs)}|{','.join(choice.forms)}"


def repeatable(graph: Graph, operator: Operator) -> bool:
    """Tell whether backward may repeat a forward operator: not what draws, and no product with a parameter.

    A product with a parameter costs what the layer is made of; attention's own are cheap beside what they make.
    """
    if operator.phase != "forward" or draws(operator.kind):
        return False
    return operator.kind != "contraction" or not any(graph.is_weight(name) for name in operator.inputs)
