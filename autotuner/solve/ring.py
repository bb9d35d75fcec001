"""A layer that follows itself: what one of many equal layers costs and holds on average, where bytes have a price."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from autotuner.errors import InfeasibleError
from autotuner.solve.budgeted import Search
from autotuner.solve.exact import with_margin
from autotuner.solve.labelled import Encoded, Labelled
from autotuner.solve.labels import Labels
from autotuner.solve.limits import Limits
from autotuner.solve.prepared import STEEP, Prepared, prepared
from autotuner.solve.priced import Plan, priced
from autotuner.solve.problem import Factor, Problem, Row
from autotuner.solve.tables import Table

# Prices tried; each is one solution of a layer.
MOST_PRICES = 20
# A price pays that may lift the bound by more than this share of it.
LIFT = 1e-5
# Where plans lie on one side of the budget only, prices are multiplied by this, so often.
NEAR_PRICE = 3.0
FEW_STEPS = 6
# Potentials of a joint's states are changed at most so often; each time is one solution of a layer.
STEPS = 16
# They are near enough where the bound is nearer to what a layer that follows itself costs than this share of it.
ENOUGH = 5e-5

# A solution of a layer is quick where it takes so many cases.
FEW_CASES = 8

# What a layer pays more for a state at its rear, by joint.
Potentials = list[dict[str, float]]


@dataclass(frozen=True, eq=False)
class Ring:
    """Equal layers in a row, seen as one whose rear meets its own front.

    Args:
        start: the layer's labels, of which its ends are left.
        joints: variable -> the next layer's variable that takes the same state.
    """

    layer: Problem
    encoded: Encoded
    start: Labelled
    joints: Mapping[str, str]
    count: int
    limits: Limits

    @cached_property
    def ready(self) -> Prepared:
        """The ring made ready.

        Raises:
            InfeasibleError: no layer can follow itself.
        """
        same = []
        for rear, front in self.joints.items():
            table: dict[Row, float] = {(state, state): 0.0 for state in self._shared(rear, front)}
            name = f"{rear} is {front} of the next layer"
            same += [Factor(name, (rear, front), table)] if rear != front else []
        return prepared(Problem((*self.layer.factors, *same)), self.limits, [*self.joints, *self.joints.values()])

    def climb(
        self, room: int, like: Plan | None = None, price: float = 0.0, enough_us: float = inf
    ) -> tuple[float, float, list[Plan]]:
        """Return the price at which the ring bounds all layers best, what it costs then, and plans that came up.

        Args:
            like: a plan; only those with its states at the joints are looked at.
            price: that is tried first.
            enough_us: a bound on all layers at which the search ends.

        Raises:
            InfeasibleError: no layer can follow itself.
        """
        given = self._like(like)
        plans: list[Plan] = []
        best_us, best_price, least_us = -inf, 0.0, 0.0
        for _ in range(MOST_PRICES):
            plan, bound_us = self.ready.at(given, price)
            plans.append(plan)
            value = self.count * bound_us - price * room
            if value > best_us:
                best_us, best_price, least_us = value, price, bound_us
            lines = [(self.count * p.time_us, self.count * p.memory.held_bytes - room) for p in plans]
            over = [line for line in lines if line[1] > 0]
            under = [line for line in lines if line[1] <= 0]
            if (self.limits.over and under) or value >= enough_us or (not over and price == 0):
                break
            if not over:
                price = price / NEAR_PRICE if len(plans) < FEW_STEPS else 0.0
                continue
            if not under:
                if price >= given.lean_price:
                    break
                steep = STEEP[0] * plan.time_us / (1 + plan.memory.held_bytes)
                price = min(max(NEAR_PRICE * price if price else steep, 1e-12), given.lean_price)
                price = price if len(plans) < FEW_STEPS else given.lean_price
                continue
            crossings = [max(0.0, (below[0] - above[0]) / (above[1] - below[1])) for above in over for below in under]
            most, following = max((min(us + at * excess for us, excess in lines), at) for at in crossings)
            if following == price or most - best_us <= LIFT * abs(best_us):
                break
            price = following
        return best_price, least_us, plans

    def bound_us(self, price: float, room: int, closed_us: float) -> tuple[float, list[Plan]]:
        """Return the least that all layers may take within the budget, and plans of single layers.

        What a layer pays for the state at its rear the next one is given back, so that layers that do not fit each
        other are no bargain. Whatever these potentials are, the bound is true; they are raised where the cheapest layer
        does not fit itself, and lowered where it would.

        Args:
            closed_us: what a layer that follows itself costs at the price, which no potentials can exceed.

        Raises:
            InfeasibleError: no layer has a neighbour.

        Source:
            Polyak, Minimization of unsmooth functionals (1969), for the steps.
        """
        plans: list[Plan] = []
        potentials: Potentials = [{} for _ in self.joints]
        if self.count == 1:
            total = self._least_us(price, potentials, plans, front=False, rear=False)
        else:
            middle = 0.0
            if self.count > 2:
                middle, potentials = self._balanced(price, plans, closed_us)
            total = (self.count - 2) * middle
            total += self._least_us(price, potentials, plans, front=False, rear=True)
            total += self._least_us(price, potentials, plans, front=True, rear=False)
        return with_margin(total, -1) - price * room, plans

    def filled(self, budget_bytes: int, known: Plan) -> Plan | None:
        """Return the fastest layer with the same states at the joints within a budget, None if it is no faster."""
        found, _ = Search(replace(self.ready, given=self._like(known)), budget_bytes, 0.0, known).found()
        return found if found.time_us < known.time_us else None

    def at_joints(self, plan: Plan) -> tuple[str, ...]:
        """Return the plan's states at the joints."""
        return tuple(plan.states[name] for name in (*self.joints, *self.joints.values()))

    def _like(self, plan: Plan | None) -> Labelled:
        """Return the ring, or what is left of it with a plan's states at the joints."""
        given, network = self.ready.given, self.ready.encoded.network
        if plan is None:
            return given
        for name, state in zip((*self.joints, *self.joints.values()), self.at_joints(plan), strict=True):
            variable = network.names.index(name)
            domain = given.left.domains.get(variable)
            # Of two that are forced to be equal, one is left.
            if domain is not None:
                only = np.zeros_like(domain)
                only[network.states[variable].index(state)] = True
                given = given.narrowed(variable, only)
        return given

    def _balanced(self, price: float, plans: list[Plan], closed_us: float) -> tuple[float, Potentials]:
        """Return the best bound on a layer between two others, and the potentials that give it."""
        potentials: Potentials = [{} for _ in self.joints]
        best, reached_us, cases = (-inf, potentials), inf, self.limits.cases
        for _ in range(STEPS):
            middle = self._least_us(price, potentials, plans, front=True, rear=True, reached_us=reached_us)
            # What is known of the cost helps, but then a search ends with its answer only: not where that may be late.
            reached_us = closed_us if self.limits.cases - cases <= FEW_CASES else inf
            cases = self.limits.cases
            if middle > best[0]:
                best = (middle, potentials)
            states = plans[-1].states
            apart = [number for number, (one, other) in enumerate(self.joints.items()) if states[one] != states[other]]
            if not apart or closed_us - middle <= ENOUGH * abs(middle) or self.limits.over:
                break
            step = (closed_us - middle) / (2 * len(apart))
            potentials = [dict(each) for each in potentials]
            for number, (rear, front) in enumerate(self.joints.items()):
                if number in apart:
                    own = potentials[number]
                    own[states[rear]] = own.get(states[rear], 0.0) + step
                    own[states[front]] = own.get(states[front], 0.0) - step
        return best

    def _least_us(
        self,
        price: float,
        potentials: Potentials,
        plans: list[Plan],
        *,
        front: bool,
        rear: bool,
        reached_us: float = inf,
    ) -> float:
        """Return what a layer with neighbours on these sides costs at least, with what its ends pay and are given.

        Args:
            reached_us: what a layer is thought to cost.
        """
        given = self.start.at(price)
        names, states = self.encoded.network.names, self.encoded.network.states
        tables = dict(given.tables)
        place = max(tables, default=0) + 1
        for known, (one, other) in zip(potentials, self.joints.items(), strict=True):
            shared = self._shared(one, other)
            for name, sign, is_there in ((one, 1.0, rear), (other, -1.0, front)):
                if is_there:
                    variable = names.index(name)
                    codes = [states[variable].index(state) for state in shared]
                    tables[place] = _weightless(variable, codes, [sign * known.get(state, 0.0) for state in shared])
                    place += 1
        given = replace(given, tables=tables).consistent({})
        try:
            found = priced(self.layer, self.encoded, given, self.limits, with_margin(reached_us, 3))
        except InfeasibleError:
            # A layer that follows itself may cost more than its bound says.
            found = priced(self.layer, self.encoded, given, self.limits)
        plans.append(found.plan)
        return found.bound_us

    def _shared(self, rear: str, front: str) -> list[str]:
        """Return the states that both ends of a joint have."""
        names, states = self.encoded.network.names, self.encoded.network.states
        fronts = set(states[names.index(front)])
        return [state for state in states[names.index(rear)] if state in fronts]


def _weightless(variable: int, codes: list[int], costs: list[float]) -> Labels:
    """Return a table of a variable's states that take no time and need no bytes, but have costs."""
    zeros = np.zeros(len(costs), np.int64)
    columns = np.array([codes], np.int32).reshape(1, len(costs))
    return Labels(Table("joint", (variable,), columns, np.array(costs)), np.zeros(len(costs)), zeros, zeros)
