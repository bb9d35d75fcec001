"""Variables, and the states of tensors: in which form one was made or held, and into which it was converted."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Literal

from autotuner.checkpoint import checkpoint
from autotuner.ir.form import Form
from autotuner.ir.formats import ABSENT
from autotuner.ir.graph import Graph
from autotuner.solve.problem.factors import Factor, Row, State
from autotuner.solve.problem.offered import Offered, Place, state_of
from autotuner.space import Choice

INSIDE = "inside "
CONVERTED = " > "
REPEATED = "again "

# A tensor is converted into two forms at most, into one where more than so many are possible.
PAIRED = 6


Role = Literal["operator", "repeated", "tensor", "saved", "token"]


@dataclass(frozen=True, slots=True)
class Variable:
    """A decision that a problem leaves open; its text names it there.

    Args:
        role: "operator" or "repeated": which choice computes an operator, at first or again in backward. "tensor" or
            "saved": how a tensor lies, in forward or as what backward reads of it. "token": which choice siblings take.
        name: of the operator, the tensor, or the siblings.
    """

    role: Role
    name: str

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


@dataclass(frozen=True, slots=True)
class TensorState:
    """State of a tensor: the form that it was made or is held in, and those that it was converted into.

    `form` is `ABSENT`, or begins with `INSIDE`, where it is not in memory; `repeated` says that backward makes it, and
    `beside` the first operator of the cover whose kernel does so beside its own work, where it is no step of its own.
    """

    form: str
    targets: tuple[str, ...] = ()
    repeated: bool = False
    beside: str = ""

    def __str__(self) -> State:
        again = f"{REPEATED}beside {self.beside} " if self.beside else REPEATED if self.repeated else ""
        return again + CONVERTED.join((self.form, *self.targets))

    @property
    def forms(self) -> tuple[str, ...]:
        return (self.form, *self.targets)

    @property
    def is_absent(self) -> bool:
        return self.form == ABSENT


@dataclass(frozen=True)
class StateTable:
    """A tensor's states, and the bytes that they hold.

    Args:
        variable: of the tensor, or of the instance of it that backward reads.
    """

    variable: Variable
    lies: Mapping[State, TensorState]
    held_bytes: Mapping[State, int]

    @cached_property
    def making(self) -> Mapping[str, list[State]]:
        """States by the form that the tensor is made in."""
        found: dict[str, list[State]] = defaultdict(list)
        for state, lies in self.lies.items():
            found[lies.form].append(state)
        return found

    @cached_property
    def holding(self) -> Mapping[str, list[State]]:
        """States by each form that the tensor can be read in."""
        found: dict[str, list[State]] = defaultdict(list)
        for state, lies in self.lies.items():
            for form in lies.forms:
                found[form].append(state)
        return found

    @cached_property
    def conversions(self) -> Mapping[State, Sequence[Place]]:
        """The conversions that a state contains."""
        name = self.variable.name
        return {state: [(name, lies.form, target) for target in lies.targets] for state, lies in self.lies.items()}

    def cost(self, conversions_us: Mapping[Place, float]) -> Factor:
        """Return the cost of each state; those that need a conversion without a cost are left out."""
        table: dict[Row, float] = {
            (state,): sum(conversions_us[place] for place in places)
            for state, places in self.conversions.items()
            if all(place in conversions_us for place in places)
        }
        held: dict[Row, int] = {(state,): count for state, count in self.held_bytes.items() if (state,) in table}
        return Factor(f"cost of {self.variable}", (str(self.variable),), table, held)


def inside(graph: Graph, choice: Choice, tensor: str) -> State:
    """Return the state of a tensor that a choice makes or reads inside; it names the choice if nobody else reads it."""
    readers = {operator.name for operator in graph.consumers[tensor]}
    return INSIDE + state_of(choice) if readers and readers <= set(choice.cover.operators) else ABSENT


def made_and_read(offered: Offered) -> Iterator[StateTable]:
    """Yield a table per tensor: how it is made and, where forward makes it, read in forward.

    A tensor is converted into at most as many forms as it has readers.
    """
    graph, given = offered.graph, offered.space.given
    made: dict[str, dict[str, None]] = {name: {} for name in graph.tensors}
    read: dict[str, dict[str, None]] = {name: {} for name in graph.tensors}
    for operator in graph.operators:
        for _, choice in offered.by_operator[operator.name]:
            checkpoint()
            for tensor in operator.outputs:
                form = choice.by_tensor[tensor] if tensor in choice.cover.outputs else inside(graph, choice, tensor)
                made[tensor][form] = None
            late = operator.phase == "backward"
            for tensor in choice.cover.inputs:
                if not (late and tensor in offered.late_readers):
                    read[tensor][choice.by_tensor[tensor]] = None
    for name, forms in given.items():
        if name not in graph.producers:
            made[name] = dict.fromkeys(forms)
        if name in graph.outputs:
            read[name].update(dict.fromkeys(forms))
    for name in graph.tensors:
        if name in offered.late_readers:  # it may be packed, only to be held so
            packed = (
                target
                for form in made[name]
                for target in offered.targets.get((name, form), ())
                if not Form.parse(target).is_raw
            )
            read[name].update(dict.fromkeys(packed))
        fixed = given[name] if name in graph.outputs else None
        most = len(graph.consumers[name]) + (name in graph.outputs)
        states = {
            str(lies): lies
            for form in made[name]
            for lies in _converted(offered, name, TensorState(form), read[name], most)
            if fixed is None or not set(fixed).isdisjoint(lies.forms)
        }
        yield StateTable(Variable("tensor", name), states, {})


def saved(offered: Offered, tables: Mapping[str, StateTable]) -> Iterator[StateTable]:
    """Yield a table per tensor that backward reads of forward: what is held of it, or that backward makes it again.

    The first state, `ABSENT`, is for those that nobody asks for: every backward kernel can do without.
    """
    graph = offered.graph
    for name, read in offered.late_readers.items():
        states = {ABSENT: TensorState(ABSENT)}
        held: dict[State, int] = {}
        for form in tables[name].holding:
            if form == ABSENT or form.startswith(INSIDE):
                continue
            for lies in _converted(offered, name, TensorState(form), read, 2):
                if not set(read).isdisjoint(lies.forms):
                    states[str(lies)] = lies
                    held[str(lies)] = offered.bytes_of(name, form)
        producer = graph.producers.get(name)
        if producer is not None and producer.name in offered.repeated:
            again = {
                choice.by_tensor[name] for _, choice in offered.repeated[producer.name] if name in choice.by_tensor
            }
            for form in sorted(again):
                for lies in _converted(offered, name, TensorState(form, repeated=True), read, 2):
                    if not set(read).isdisjoint(lies.forms):
                        states[str(lies)] = lies
        for beside, form in offered.remade.get(name, ()):
            for lies in _converted(offered, name, TensorState(form, repeated=True, beside=beside), read, 2):
                if not set(read).isdisjoint(lies.forms):
                    states[str(lies)] = lies
        yield StateTable(Variable("saved", name), states, held)


def _converted(
    offered: Offered, name: str, lies: TensorState, wanted: Iterable[str], most: int
) -> Iterator[TensorState]:
    """Yield what a tensor can become by conversions into wanted forms."""
    checkpoint()
    targets = sorted(form for form in wanted if (name, lies.form, form) in offered.conversions)
    for count in range(min(2 if len(targets) <= PAIRED else 1, most, len(targets)) + 1):
        for chosen in combinations(targets, count):
            yield replace(lies, targets=chosen)
