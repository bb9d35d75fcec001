"""Links: factors that allow the states of an operator with the states of its tensors."""

from collections.abc import Iterator, Mapping
from itertools import repeat

from autotuner.checkpoint import checkpoint
from autotuner.errors import ProblemError
from autotuner.solve.problem.factors import Factor, Row, State
from autotuner.solve.problem.offered import Offered
from autotuner.solve.problem.states import StateTable, Variable, inside

NOT_REPEATED = "not repeated"

ROWS_MAX = 10_000_000
"""Of all factors, 220 bytes each: 24 encoder layers written out have 3.5 million, and 8.4 million under a budget."""


def operator_costs(offered: Offered, choices_us: Mapping[State, float]) -> Iterator[Factor]:
    """Yield each operator's costs, without the states that have none; a cover's is shared evenly by its members."""
    for operator in offered.graph.operators:
        stated = offered.by_operator[operator.name]
        costs: dict[Row, float] = {
            (state,): choices_us[state] / len(choice.cover.operators) for state, choice in stated if state in choices_us
        }
        variable = str(Variable("operator", operator.name))
        yield Factor(f"cost of {variable}", (variable,), costs)
    for name, stated in offered.repeated.items():
        costs = {(NOT_REPEATED,): 0.0}
        costs.update(((state,), choices_us[state]) for state, _ in stated if state in choices_us)
        yield Factor(f"cost of repeating {name}", (str(Variable("repeated", name)),), costs)


def links(offered: Offered, tables: Mapping[str, StateTable], held: Mapping[str, StateTable]) -> Iterator[Factor]:
    """Yield which states of an operator go with which states of each of its tensors."""
    graph = offered.graph
    for operator in graph.operators:
        stated, own = offered.by_operator[operator.name], str(Variable("operator", operator.name))
        extra = {
            tensor
            for _, choice in stated
            if choice.cover.operators[0] == operator.name
            for tensor in choice.cover.inputs
            if not any(tensor in offered.operators[name].inputs for name in choice.cover.operators)
        }
        late = operator.phase == "backward"
        checkpoint()
        for tensor in (*dict.fromkeys(operator.inputs), *operator.outputs, *sorted(extra)):
            read_late = late and tensor in held
            table = held[tensor] if read_late else tables[tensor]
            rows: dict[Row, float] = {}
            for state, choice in stated:
                form = choice.by_tensor.get(tensor)
                if tensor in choice.cover.outputs and form:  # made here, or by another member of the same cover
                    partners = table.making[form]
                elif tensor in choice.cover.inputs and form:
                    partners = table.holding.get(form, [])
                elif read_late or (
                    tensor not in operator.outputs and (graph.tensors[tensor].optional or tensor in extra)
                ):  # the kernel makes it again inside, or does without
                    partners = list(table.lies)
                else:
                    partners = table.making.get(inside(graph, choice, tensor), [])
                rows.update(dict.fromkeys(zip(repeat(state), partners), 0.0))
                check_rows(len(rows))
            yield Factor(f"{operator.name} with {tensor}", (own, str(table.variable)), rows)
    for name, ways in offered.remade.items():
        for operator_name in dict.fromkeys(beside for beside, _ in ways) if name in held else ():
            checkpoint()
            yield _beside(offered, operator_name, held[name])
    for name, table in held.items():
        checkpoint()
        yield _kept(name, tables[name], table)


def repeated_links(
    offered: Offered, tables: Mapping[str, StateTable], held: Mapping[str, StateTable]
) -> Iterator[Factor]:
    """Yield the same for forward operators that backward may repeat: all that one makes is made, or nothing."""
    for name, stated in offered.repeated.items():
        operator, own = offered.operators[name], str(Variable("repeated", name))
        for tensor in dict.fromkeys(operator.inputs):
            table = held.get(tensor, tables[tensor])
            rows: dict[Row, float] = {(NOT_REPEATED, partner): 0.0 for partner in table.lies}
            for state, choice in stated:
                checkpoint()
                form = choice.by_tensor[tensor]
                rows.update(((state, partner), 0.0) for partner in table.holding.get(form, ()))
            yield Factor(f"{name} repeated with {tensor}", (own, str(table.variable)), rows)
        for tensor in operator.outputs:
            if tensor not in held:
                continue
            table = held[tensor]
            rows = {
                (NOT_REPEATED, partner): 0.0 for partner, lies in table.lies.items() if not lies.repeated or lies.beside
            }
            for state, choice in stated:
                made = choice.by_tensor.get(tensor)
                rows.update(
                    ((state, partner), 0.0)
                    for partner, lies in table.lies.items()
                    if not lies.beside and (lies.form == made if lies.repeated else made is None or lies.is_absent)
                )
            yield Factor(f"{name} repeated makes {tensor}", (own, str(table.variable)), rows)


def _beside(offered: Offered, operator: str, held: StateTable) -> Factor:
    """Return which choices of an operator go with what is held of a tensor that some of them make again."""
    name = held.variable.name
    elsewhere = [partner for partner, lies in held.lies.items() if lies.beside != operator]
    rows: dict[Row, float] = {}
    for state, choice in offered.by_operator[operator]:
        if name in choice.cover.remade and choice.cover.operators[0] == operator:
            form = choice.by_tensor[name]
            own = [partner for partner, lies in held.lies.items() if (lies.beside, lies.form) == (operator, form)]
            rows.update(((state, partner), 0.0) for partner in own)
        else:
            rows.update(((state, partner), 0.0) for partner in elsewhere)
    return Factor(f"{operator} makes {name} again", (str(Variable("operator", operator)), str(held.variable)), rows)


def _kept(name: str, made: StateTable, held: StateTable) -> Factor:
    """Return which forms can be held: those that forward has. What is made again or not asked for may be anything."""
    rows: dict[Row, float] = {}
    for state, lies in held.lies.items():
        partners = made.lies if lies.repeated or lies.is_absent else made.holding.get(lies.form, ())
        rows.update(((partner, state), 0.0) for partner in partners)
    return Factor(f"{name} held", (str(made.variable), str(held.variable)), rows)


def check_rows(rows: int) -> None:
    """Check that a problem has no more rows than memory takes.

    Raises:
        ProblemError: it has.
    """
    checkpoint()
    if rows > ROWS_MAX:
        raise ProblemError(
            f"the problem has more than {ROWS_MAX:,} rows: tune one of the layers that repeat, give tensors fewer "
            "axes, or a search space with fewer kernels or `layouts: declared`"
        )
