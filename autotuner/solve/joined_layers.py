"""Labels of one layer joined to labels of many: what is behind matters only by the states at the joint."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from autotuner.solve.labelled import Encoded
from autotuner.solve.labelling import FEW_LABELS, nothing
from autotuner.solve.labels import Labels, Rows, joined, undominated_rows
from autotuner.solve.limits import Limits, TooLargeError
from autotuner.solve.tables import Codes, Costs, Table

# Variables of the tables here: what is at the front of a layer, and what is at its rear; numbers of combinations.
FRONT, REAR = 0, 1
# A join may make so many times as many pairs as there may be labels.
PAIRS = 50


@dataclass(eq=False)
class Joined:
    """Layers in a row, by their labels.

    Args:
        joints: variable -> the next layer's variable that takes the same state.
        count: of layers.
        floor_bytes: what every plan needs for a while; what a label needs beyond it has the price too.
        price: of a held byte, in microseconds.
        spent_us: how much longer than the best the plan that was found may take.
    """

    encoded: Encoded
    joints: Mapping[str, str]
    count: int
    floor_bytes: int
    price: float
    spent_us: float = 0.0
    _walked: list[tuple[Rows, Rows]] = field(default_factory=list)

    def best(
        self, whole: Labels, limits: Limits, budget_bytes: float, most_us: float, slack_us: float, most_labels: float
    ) -> list[int] | None:
        """Return the fastest plan that fits, of those the leanest, as a row for each layer; None where there is none.

        Args:
            whole: what one layer may be, by the states of its ends.
            most_us: time and price of all layers, at most.
            slack_us: what may be lost at each joint, where labels are many.

        Raises:
            TooLargeError: labels get too many.
        """
        whole = whole.costing(whole.time_us + self.price * whole.held_bytes)
        fronts, rears, joint_count = self._joints(whole)
        counts = [joint_count, joint_count]
        rest = self._rest(whole.table.costs, fronts, rears, joint_count)
        so_far = nothing()
        for place in range(self.count):
            # What the layers behind cost at least, whatever is at the joint.
            after = float(rest[place].min())
            ends = ([FRONT] if place else []) + ([REAR] if place < self.count - 1 else [])
            step = _by_ends(whole, {FRONT: fronts, REAR: rears}, ends, counts)
            if place:
                both = joined(so_far, step, counts, limits, PAIRS * most_labels, most_us - after)
                before, rows = both.parts[0][1], step.parts[0][1][both.parts[1][1]]
                found = both.without((FRONT,))
            else:
                found, before, rows = step, np.zeros(step.rows, np.intp), step.parts[0][1]
            costs = found.table.costs + self.price * np.maximum(found.transient_bytes - self.floor_bytes, 0)
            if place < self.count - 1:
                costs = costs + rest[place][found.table.column(REAR)]
            fit = (costs <= most_us) & (costs < np.inf) & (found.held_bytes + found.transient_bytes <= budget_bytes)
            found, before, rows = found.take(np.flatnonzero(fit)), before[fit], rows[fit]
            if not found.rows:
                return None
            slack = slack_us if found.rows > FEW_LABELS else 0.0
            self.spent_us += slack
            # The part is the table itself, so that its rows say which ones are left.
            found = undominated_rows(found.made_of(((found, np.arange(found.rows)),)), counts, slack)
            if found.rows > most_labels:
                raise TooLargeError(f"{place + 1} layers have more than {most_labels:,.0f} labels")
            left = found.parts[0][1]
            self._walked.append((before[left], rows[left]))
            variables = tuple(FRONT for _ in found.table.variables)
            table = Table(found.table.name, variables, found.table.columns, found.table.costs)
            so_far = Labels(table, found.time_us, found.held_bytes, found.transient_bytes, (), found.spread)
        row = int(np.lexsort((so_far.held_bytes + so_far.transient_bytes, so_far.time_us))[0])
        plan = []
        for before, rows in reversed(self._walked):
            plan.append(int(rows[row]))
            row = int(before[row])
        return plan[::-1]

    def _joints(self, whole: Labels) -> tuple[Codes, Codes, int]:
        """Return the number of each row's combination at the front and at the rear, and the count of combinations.

        Equal numbers are equal states; one that no row has on the other side is the last, and joins nothing.
        """
        names, states = self.encoded.network.names, self.encoded.network.states

        def named(ends: Collection[str]) -> list[tuple[str, ...]]:
            places = [names.index(name) for name in ends]
            columns = [[states[v][code] for code in whole.table.column(v).tolist()] for v in places]
            return list(zip(*columns, strict=True)) if columns else [()] * whole.rows

        front, rear = named(list(self.joints.values())), named(list(self.joints))
        common = {row: number for number, row in enumerate(sorted(set(front) & set(rear)))}
        none = len(common)
        fronts = np.array([common.get(row, none) for row in front], np.int32)
        rears = np.array([common.get(row, none) for row in rear], np.int32)
        return fronts, rears, none + 1

    def _rest(self, costs: Costs, fronts: Codes, rears: Codes, joint_count: int) -> list[Costs]:
        """Return what the layers after each one cost at least, by the combination at its rear."""
        rest = [np.zeros(joint_count)]
        for _ in range(self.count - 1):
            behind = rest[-1].copy()
            if len(rest) > 1:
                behind[-1] = np.inf
            least = np.full(joint_count, np.inf)
            np.minimum.at(least, fronts, costs + (behind[rears] if len(rest) > 1 else 0.0))
            least[-1] = np.inf
            rest.append(least)
        return rest[::-1]


def _by_ends(whole: Labels, columns: Mapping[int, Codes], ends: list[int], counts: list[int]) -> Labels:
    """Return the labels by the combinations at some ends, without those that others beat; its part is all of them."""
    codes = np.stack([columns[end] for end in ends]) if ends else np.zeros((0, whole.rows), np.int32)
    table = Table("layer", tuple(ends), codes, whole.table.costs)
    rows: Rows = np.flatnonzero((codes < counts[0] - 1).all(axis=0)) if ends else np.arange(whole.rows)
    labels = Labels(table, whole.time_us, whole.held_bytes, whole.transient_bytes, ((whole, np.arange(whole.rows)),))
    return undominated_rows(labels.take(rows), counts)
