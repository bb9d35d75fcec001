"""Min-sum variable elimination: one variable after another is minimised out, then the choices are read back."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotuner.errors import InfeasibleError
from autotuner.solvers.bounds import near_order, pruned, tightened
from autotuner.solvers.consistency import Consistent, bound_us, consistent
from autotuner.solvers.search import first_assignment
from autotuner.solvers.tables import Codes, Table, join, product, project

# More sweeps lift the bound by less than the next elimination does; seen on layers of 80 operators.
SWEEPS = 8
# A join may be this much larger than what is left of it after the projection.
JOINED = 20


@dataclass(frozen=True, eq=False, slots=True)
class Choice:
    """The best state of a variable that is gone, for each row of the variables that stood beside it."""

    variable: int
    rest: Table
    states: Codes

    def state(self, codes: Mapping[int, int]) -> int:
        """Return the variable's best state where the others have these states."""
        match = np.ones(self.rest.rows, np.bool_)
        for other, column in zip(self.rest.variables, self.rest.columns, strict=True):
            match &= column == codes[other]
        return int(self.states[np.argmax(match)])


class Elimination:
    """The tables that are left while variables are eliminated, and the choices so far, in order.

    Args:
        names: of the variables, by number, for messages.
        state_counts: number of states of each variable.
        tables: what is to be minimised in sum; arc consistent.
        choices: of variables that are gone already.
        constant: what is to be added to the sum.
    """

    def __init__(
        self,
        names: Sequence[str],
        state_counts: Sequence[int],
        tables: Iterable[Table],
        choices: Iterable[Choice] = (),
        constant: float = 0.0,
    ) -> None:
        self.names = names
        self.state_counts = state_counts
        self.choices = list(choices)
        self.constant = constant
        self.tables: dict[int, Table] = {}
        self.readers: dict[int, dict[int, None]] = {}
        self._made = 0
        for table in tables:
            self._add(table)

    @property
    def rows(self) -> int:
        """The number of rows that are left, of all tables."""
        return sum(table.rows for table in self.tables.values())

    def copy(self) -> "Elimination":
        """Return another elimination that goes on from here."""
        return Elimination(self.names, self.state_counts, self.tables.values(), self.choices, self.constant)

    def codes(self) -> dict[int, int]:
        """Return the best state of each variable, all of which are eliminated."""
        codes: dict[int, int] = {}
        for choice in reversed(self.choices):
            codes[choice.variable] = choice.state(codes)
        return codes

    def run(self, most_rows: float) -> bool:
        """Eliminate the variable whose result is estimated to be the smallest, again and again.

        Args:
            most_rows: stop where the next result would have more rows, or its join `JOINED` times as many.

        Returns:
            Whether every variable is eliminated; `constant` is the least total then.

        Raises:
            InfeasibleError: the tables of some variable share no row.
            ProblemError: a join would need too much memory.
        """
        alive = {v: self._states(v) for v in self.readers}
        rows = {v: self._estimate(v, alive) for v in self.readers}
        while rows:
            variable = min(rows, key=lambda v: (rows[v], v))
            if rows[variable][0] > most_rows or rows[variable][1] > JOINED * most_rows:
                return False
            del rows[variable]
            for touched in self._eliminate(variable):
                rows[touched] = self._estimate(touched, alive)
        return True

    def tighten(self, most_us: float) -> float:
        """Move costs between tables for a tight bound, drop what cannot be part of a total as low as `most_us`.

        Returns:
            The bound: no assignment of what was left costs less.

        Raises:
            InfeasibleError: nothing is left.
        """
        # Dropping rows before the sweeps as well makes the sweeps several times cheaper on what was tightened before.
        left, _ = self._pruned(consistent(self.names, self.tables, self.state_counts), most_us)
        left, bound = self._pruned(tightened(left, near_order(left), SWEEPS), most_us)
        self._replace(left)
        return bound

    def _pruned(self, left: Consistent, most_us: float) -> tuple[Consistent, float]:
        bound = self.constant + bound_us(left.tables.values())
        if bound > most_us:
            raise InfeasibleError(f"no assignment costs {most_us} us or less: the bound is {bound} us")
        return pruned(left, most_us - bound), bound

    def dive(self) -> float | None:
        """Return the total of the first assignment that a greedy search finds; None where it gave up.

        Raises:
            InfeasibleError: there is no assignment.
        """
        left = consistent(self.names, self.tables, self.state_counts)
        found = first_assignment(left, near_order(left), {}, most_backtracks=50)
        return None if found is None else self.constant + bound_us(found.tables.values())

    def halves(self) -> list["Elimination"]:
        """Return eliminations that share out the states of the variable with most rows; the cheaper half comes first.

        Raises:
            InfeasibleError: nothing is left of either.
        """
        left = consistent(self.names, self.tables, self.state_counts)
        rows = {v: sum(left.tables[place].rows for place in left.readers[v]) for v in left.readers}
        variable = max(rows, key=lambda v: (len(left.states(v)) > 1, rows[v], -v))
        states = left.states(variable)
        ranked = states[np.argsort(left.cheapest(variable)[states], kind="stable")]
        cheaper = np.zeros_like(left.domains[variable])
        cheaper[ranked[: (len(ranked) + 1) // 2]] = True
        halves = []
        for half in (cheaper, left.domains[variable] & ~cheaper):
            try:
                case = self.copy()
                case._replace(left.narrowed({variable: half}))
                halves.append(case)
            except InfeasibleError as error:
                reason = error
        if not halves:
            raise reason
        return halves

    def _replace(self, left: Consistent) -> None:
        """Go on with these tables; a variable with a single state left is gone."""
        self.tables, self.readers = {}, {}
        settled = {v: np.flatnonzero(domain) for v, domain in left.domains.items() if domain.sum() == 1}
        nothing = Table("", (), np.zeros((0, 1), np.int32), np.zeros(1))
        self.choices += [Choice(v, nothing, states.astype(np.int32)) for v, states in settled.items()]
        for table in left.tables.values():
            self._add(table.without(settled))

    def _add(self, table: Table) -> None:
        """Add a table, as one with every table whose variables are among its own, or that has all of its own."""
        while True:
            scope = set(table.variables)
            near = {place: None for variable in table.variables for place in self.readers.get(variable, ())}
            scopes = ((place, set(self.tables[place].variables)) for place in near)
            fits = next((place for place, other in scopes if other <= scope or scope <= other), None)
            if fits is None:
                break
            other = self._remove(fits)
            table = join(table, other, self.state_counts)
            if not table.rows:
                raise InfeasibleError(f"no row of {table.name!r} agrees with any of {other.name!r}")
        if not table.variables:
            self.constant += float(table.costs.sum())
            return
        self.tables[self._made] = table
        for variable in table.variables:
            self.readers.setdefault(variable, {})[self._made] = None
        self._made += 1

    def _remove(self, place: int) -> Table:
        table = self.tables.pop(place)
        for variable in table.variables:
            del self.readers[variable][place]
        return table

    def _states(self, variable: int) -> int:
        return min(len(np.unique(self.tables[place].column(variable))) for place in self.readers[variable])

    def _estimate(self, variable: int, alive: Mapping[int, int]) -> tuple[float, float]:
        """Return how many rows the result of eliminating a variable has, and the join before it.

        Exact for tables that share this variable alone; each other one that several name is taken as independent.
        """
        matches = np.ones(self.state_counts[variable])
        shared: dict[int, int] = {}
        for place in self.readers[variable]:
            table = self.tables[place]
            matches *= np.bincount(table.column(variable), minlength=len(matches))
            for other in table.variables:
                shared[other] = shared.get(other, 0) + 1
        shared.pop(variable, None)
        joined = float(matches.sum()) / product(alive[v] ** (count - 1) for v, count in shared.items())
        return min(joined, product(alive[v] for v in shared)), joined

    def _eliminate(self, variable: int) -> tuple[int, ...]:
        """Minimise the variable out of its tables; return the variables that stood beside it."""
        bucket = sorted((self._remove(place) for place in list(self.readers[variable])), key=lambda table: table.rows)
        del self.readers[variable]
        joined = bucket[0]
        for table in bucket[1:]:
            joined = join(joined, table, self.state_counts)
        if not joined.rows:
            factors = ", ".join(repr(table.name) for table in bucket)
            raise InfeasibleError(f"no state of variable {self.names[variable]!r} fits all that name it: {factors}")
        rest, states = project(joined, variable, self.state_counts)
        self.choices.append(Choice(variable, rest, states))
        self._add(rest)
        return rest.variables
