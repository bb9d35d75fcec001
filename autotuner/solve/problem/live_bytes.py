"""Bytes that are live at moments of a training step, as sums over a problem's rows: lower bounds on a plan's peak.

A moment is the boundary between forward and backward, the run of an operator's kernel, a conversion, or the repetition
of an operator in backward. At a moment, memory holds the operands of what runs, and each tensor that an earlier
operator has made and that a later one still reads. Operators count as earlier or later only where each choice makes
them so.
Nothing is counted twice, and what no row tells is left out: so no plan needs less at a moment than its rows say.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from autotuner.checkpoint import checkpoint
from autotuner.ir.device import alignment_bytes
from autotuner.ir.form import Form
from autotuner.ir.formats import ABSENT
from autotuner.solve.problem.factors import Factor, Problem, Row, State
from autotuner.solve.problem.links import NOT_REPEATED
from autotuner.solve.problem.offered import Offered, Stated
from autotuner.solve.problem.running_order import RunningOrder
from autotuner.solve.problem.states import INSIDE, TensorState, Variable

BOUNDARY = "boundary"
"""The moment between forward and backward; others are named after variables: what they choose runs then."""
ALIGNMENT_BYTES = 64
"""The memory planner pads each block to a multiple."""


@dataclass(frozen=True)
class LiveShare:
    """Bytes of a factor's rows that are live at some moments; rows that are not there have none."""

    factor: str
    moments: tuple[str, ...]
    row_bytes: Mapping[Row, int]


@dataclass(frozen=True)
class LiveBytes:
    """Lower bounds on the bytes that are live at each moment, beside what the caller is handed.

    Args:
        given_bytes: by moment, what is live whatever the plan.
        shares: what rows add to it.
        workspaces: what kernels allocate while they run.
    """

    given_bytes: Mapping[str, int]
    shares: tuple[LiveShare, ...]
    workspaces: tuple[LiveShare, ...]

    def above(self, workspace_bytes: int) -> "LiveBytes":
        """Return what is live beside a workspace of so many bytes, which every plan has: only larger ones count."""
        more = (
            replace(
                share, row_bytes={row: n - workspace_bytes for row, n in share.row_bytes.items() if n > workspace_bytes}
            )
            for share in self.workspaces
        )
        return LiveBytes(self.given_bytes, (*self.shares, *(share for share in more if share.row_bytes)), ())

    def of(self, problem: Problem, states: Mapping[str, State]) -> dict[str, int]:
        """Return the bytes of an assignment at each moment."""
        variables = {factor.name: factor.variables for factor in problem.factors}
        found = dict(self.given_bytes)
        for share in (*self.shares, *self.workspaces):
            count = share.row_bytes.get(tuple(states[name] for name in variables[share.factor]), 0)
            for moment in share.moments if count else ():
                found[moment] += count
        return found

    def weighed(self, problem: Problem, weights: Mapping[str, int]) -> Problem:
        """Return the problem where an assignment holds its bytes at each moment, so many times, beside those given."""
        held = self._summed(weights)
        factors = (
            replace(factor, held_bytes={row: int(n) for row, n in held[factor.name].items() if row in factor.table})
            for factor in problem.factors
        )
        return Problem(tuple(factors), problem.chain)

    def priced(self, problem: Problem, prices_us: Mapping[str, float]) -> Problem:
        """Return the problem where a byte at each moment costs so much, beside those given."""
        more = self._summed(prices_us)
        factors = (
            Factor(
                factor.name,
                factor.variables,
                {row: us + more[factor.name].get(row, 0.0) for row, us in factor.table.items()},
            )
            for factor in problem.factors
        )
        return Problem(tuple(factors), problem.chain)

    def _summed(self, weights: Mapping[str, float]) -> dict[str, dict[Row, float]]:
        """Return the weighted bytes of each factor's rows."""
        found: dict[str, dict[Row, float]] = defaultdict(dict)
        for share in (*self.shares, *self.workspaces):
            times = sum(weights.get(moment, 0) for moment in share.moments)
            of = found[share.factor]
            for row, count in share.row_bytes.items() if times else ():
                of[row] = of.get(row, 0) + times * count
        return found


def live_bytes(
    problem: Problem,
    offered: Offered,
    lies: Mapping[str, Mapping[State, TensorState]],
    workspaces: Mapping[State, int],
) -> LiveBytes:
    """Return bounds on what is live at each moment of the plans of a problem.

    Args:
        lies: the states of tensors, by the text of their variables.
        workspaces: bytes that an operator's kernel allocates at least while it runs, by the operator's state; none
            where it is missing.
    """
    return _MomentBuilder(problem, offered, lies, workspaces).found()


@dataclass(frozen=True)
class _Moment:
    """Time of a step that a variable chooses.

    Args:
        made: operators that have run by then, in the same phase, or run in the same kernel.
        after: operators of the phase that run then or later.
        strictly: those that run later.
        own: tensors whose bytes the step's own rows tell.
    """

    name: str
    is_late: bool
    made: frozenset[str]
    after: frozenset[str]
    strictly: frozenset[str]
    own: frozenset[str]


class _MomentBuilder:
    def __init__(
        self,
        problem: Problem,
        offered: Offered,
        lies: Mapping[str, Mapping[State, TensorState]],
        workspaces: Mapping[State, int],
    ) -> None:
        self._offered, self._graph, self._lies, self._workspaces = offered, offered.graph, lies, workspaces
        self._factors = {factor.name: factor for factor in problem.factors}
        self._order = RunningOrder(offered)
        self._stacked = {
            name
            for choice in offered.choices.values()
            for name, text in zip(choice.cover.inputs + choice.cover.outputs, choice.candidate.forms, strict=True)
            if Form.parse(text).stack is not None
        }
        self._block_bytes = max(ALIGNMENT_BYTES, alignment_bytes(offered.space.device_type))
        self._bytes: dict[tuple[str, str], int] = {}
        self._allocated: list[LiveShare] = []

    def found(self) -> LiveBytes:
        given = [(name, self._graph.tensors[name].axes) for name in self._graph.given_gradients]
        bytes_of = {BOUNDARY: sum(self._bytes_of(*place) for place in given)}
        shares = [self._held(name) for name in self._offered.late_readers]
        ahead: dict[tuple[str, str], list[str]] = defaultdict(list)
        for moment, own in (*self._kernels(), *self._conversions(), *self._repetitions()):
            checkpoint()
            bytes_of[moment.name] = 0
            shares += own
            for name in self._graph.tensors:
                factor = None if name in moment.own else self._later(moment, name)
                if factor is not None:
                    ahead[factor, name].append(moment.name)
        for (factor, name), moments in ahead.items():
            checkpoint()
            shares.append(LiveShare(factor, tuple(moments), self._read_later(self._factors[factor], name)))
        return LiveBytes(bytes_of, tuple(share for share in shares if share.row_bytes), tuple(self._allocated))

    def _bytes_of(self, name: str, form: str) -> int:
        """Return the bytes of a tensor in a form, padded where it has a buffer of its own.

        Parameters have none, and what the caller is handed is in every plan. The gradient of a parameter is handed out
        in whatever form it has.
        """
        known = self._bytes.get((name, form))
        if known is None:
            known = 0
            tensor = self._graph.tensors[name]
            of = self._graph.tensors.get(name.removeprefix("grad_"))
            handed = name in self._graph.outputs and (
                form == tensor.axes or (of is not None and of is not tensor and of.role == "parameter")
            )
            if tensor.role != "parameter" and not handed and form != ABSENT and not form.startswith(INSIDE):
                known = self._offered.bytes_of(name, form)
                if name not in self._stacked:
                    known = -(-known // self._block_bytes) * self._block_bytes
            self._bytes[name, form] = known
        return known

    def _held(self, name: str) -> LiveShare:
        """Return what a tensor holds at the boundary; an output that backward reads is handed out as a copy."""
        factor = self._factors[f"cost of {Variable('saved', name)}"]
        rows: dict[Row, int] = {
            (state,): self._bytes_of(name, self._lies[factor.variables[0]][state].form) or count
            for (state,), count in factor.held_bytes.items()
        }
        return LiveShare(factor.name, (BOUNDARY,), rows)

    def _kernels(self) -> Iterator[tuple[_Moment, list[LiveShare]]]:
        """Yield each operator's own run: what its kernel reads and makes."""
        order = self._order
        for operator in self._graph.operators:
            name, stated = operator.name, self._offered.by_operator[operator.name]
            moment = self._moment(Variable("operator", name), order.before[name], (name,), name in order.late)
            linked = [tensor for tensor in self._graph.tensors if f"{name} with {tensor}" in self._factors]
            # Tensors that other members of a cover touch may be live whatever the choice, which tells more.
            apart = {tensor for tensor in self._graph.tensors if self._later(moment, tensor) is not None}
            alone: dict[Row, int] = {}
            for state, choice in stated:
                places = ((t, form) for t, form in choice.by_tensor.items() if t not in linked and t not in apart)
                alone[state,] = sum(self._bytes_of(*place) for place in places)
            self._allocated.append(self._allocating(f"cost of {Variable('operator', name)}", moment, stated))
            shares = [self._share(f"cost of {Variable('operator', name)}", moment, alone)]
            for tensor in linked:
                factor = self._factors[f"{name} with {tensor}"]
                own = {state: self._bytes_of(tensor, choice.by_tensor.get(tensor, ABSENT)) for state, choice in stated}
                shares.append(self._share(factor.name, moment, {row: own[row[0]] for row in factor.table}))
            others = {t for _, choice in stated for t in choice.by_tensor} - apart
            yield replace(moment, own=frozenset((*linked, *others))), shares

    def _conversions(self) -> Iterator[tuple[_Moment, list[LiveShare]]]:
        """Yield each tensor's conversion, where it has both forms: right before the first operator that reads it."""
        order = self._order
        for variable, states in self._lies.items():
            role, _, name = variable.partition(" ")
            if not any(state.targets for state in states.values()):
                continue
            producer = self._graph.producers.get(name)
            is_late = role == "saved" or order.is_made_late(name)
            readers = order.late_readers(name) if role == "saved" else order.readers(name, is_late)
            if is_late and readers:
                made = frozenset.intersection(*(order.strictly_before[reader] for reader in readers))
            elif producer is not None:
                made = order.before[producer.name]
            else:
                continue
            if not readers:
                continue
            moment = self._moment(Variable("tensor" if role == "tensor" else "saved", name), made, readers, is_late)
            rows: dict[Row, int] = {
                (text,): self._bytes_of(name, state.form) + max(self._bytes_of(name, form) for form in state.targets)
                for text, state in states.items()
                if state.targets
            }
            yield replace(moment, own=frozenset((name,))), [self._share(f"cost of {variable}", moment, rows)]

    def _repetitions(self) -> Iterator[tuple[_Moment, list[LiveShare]]]:
        """Yield each operator's repetition in backward, right before the first operator that reads what it makes."""
        order = self._order
        for name, stated in self._offered.repeated.items():
            readers = order.readers_again(name)
            if not readers:
                continue
            made = frozenset.intersection(*(order.strictly_before[reader] for reader in readers))
            moment = self._moment(Variable("repeated", name), made, readers, True)
            rows: dict[Row, int] = {
                (state,): sum(self._bytes_of(*place) for place in choice.by_tensor.items()) for state, choice in stated
            }
            self._allocated.append(self._allocating(f"cost of repeating {name}", moment, stated))
            own = frozenset(tensor for _, choice in stated for tensor in choice.by_tensor)
            yield replace(moment, own=own), [self._share(f"cost of repeating {name}", moment, rows)]

    def _moment(self, variable: Variable, made: frozenset[str], readers: Iterable[str], is_late: bool) -> _Moment:
        order = self._order
        after = frozenset.intersection(*(order.after[reader] for reader in readers))
        strictly = frozenset.intersection(*(order.strictly_after[reader] for reader in readers))
        return _Moment(str(variable), is_late, made, after, strictly, frozenset())

    def _share(self, factor: str, moment: _Moment, rows: Mapping[Row, int]) -> LiveShare:
        table = self._factors[factor].table
        return LiveShare(factor, (moment.name,), {row: count for row, count in rows.items() if count and row in table})

    def _allocating(self, factor: str, moment: _Moment, stated: Stated) -> LiveShare:
        rows: dict[Row, int] = {(state,): self._workspaces.get(state, 0) for state, _ in stated}
        return self._share(factor, moment, rows)

    def _later(self, moment: _Moment, name: str) -> str | None:
        """Return the factor whose rows tell that a tensor is live at a moment, and is not of what runs then."""
        order, producer = self._order, self._graph.producers.get(name)
        made_late = order.is_made_late(name)
        if (made_late and not moment.is_late) or self._graph.tensors[name].role == "parameter":
            return None
        if made_late == moment.is_late and producer is not None and producer.name not in moment.made:
            return None
        saved = name in self._offered.late_readers
        if saved and not moment.is_late:
            return f"{name} held"
        readers = [
            reader
            for reader in order.readers(name, moment.is_late)
            if reader in moment.after and f"{reader} with {name}" in self._factors
        ]
        if readers:
            return f"{max(readers, key=lambda reader: self._reading(reader, name))} with {name}"
        for again in self._offered.repeated if saved else ():
            factor = f"{again} repeated with {name}"
            if factor in self._factors and moment.strictly.issuperset(order.readers_again(again)):
                return factor
        return None

    def _reading(self, reader: str, name: str) -> tuple[float, int]:
        """Return how many of an operator's choices read a tensor; of equal ones, the last operator counts."""
        stated = self._offered.by_operator[reader]
        return sum(name in choice.by_tensor for _, choice in stated) / len(stated), self._order.number[reader]

    def _read_later(self, factor: Factor, name: str) -> dict[Row, int]:
        """Return the least bytes of a tensor from the time that it is made to that at which it is read, by row."""
        rows: dict[Row, int] = {}
        if factor.name == f"{name} held":
            made, held = (self._lies[variable] for variable in factor.variables)
            for row in factor.table:
                if not held[row[1]].repeated:
                    rows[row] = min(self._bytes_of(name, made[row[0]].form), self._bytes_of(name, held[row[1]].form))
        else:
            lies = self._lies[factor.variables[1]]
            for row in factor.table:
                choice = None if row[0] == NOT_REPEATED else self._offered.choices[row[0]]
                state = lies[row[1]]
                if choice is not None and name in choice.cover.inputs and not state.repeated:
                    read = self._bytes_of(name, choice.by_tensor[name])
                    rows[row] = min(read, self._bytes_of(name, state.form))
        return {row: count for row, count in rows.items() if count}
