"""Room of a step's memory budget: how much of it predictions may take, which steps that were measured tell.

An allocator that hands out memory in blocks holds more than it has given out, and how much more depends on the ways
that regions run. So choices begin from below: the first one leaves a share of the budget free, and one that stays
well under it is followed by one that takes most of what is left.
"""

from math import ceil

MARGIN = 1 / 256
"""Of the budget, which is given up beyond what a measured step was above it."""
SHORT = 1 / 32
"""Of the budget, which a step counts as above it that found no memory, and twice as much each further time: how much
it lacked is not known. A captured step of GPT-2 medium reserves 5 to 9 % more than is predicted."""
SPARE = 1 / 25
"""Of the budget, which the first choice leaves free where the allocator hands out memory in blocks. Captured steps of
BERT-large and LLaMA 1B that kept to their budget reserved 1.5 to 3.2 % more than was predicted."""
WORTH = 1 / 100
"""Of the budget, which has to be left for another choice."""
TAKEN = 3 / 4
"""Of what is left, which the next choice takes."""
TRIES = 4
"""Choices that are measured before each region runs the leanest way that it has."""


class BudgetRoom:
    """Room that a budget leaves to what is predicted.

    Attributes:
        budget_bytes: that a step may need.
        beside_bytes: that the allocator holds beside what it has given out, and that steps were above their prediction.
        spare: share of the budget that is left free.
        tries: choices so far.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.begin(0, 0)
        self._short = SHORT

    def begin(self, peak_bytes: int, reserved_bytes: int) -> None:
        """Begin with a step in which regions ran as lean as they can.

        Args:
            peak_bytes: that were allocated at most.
            reserved_bytes: that the allocator held; 0 where it keeps nothing that is freed.
        """
        self.beside_bytes, self.spare = max(0, reserved_bytes - peak_bytes), SPARE if reserved_bytes else 0.0
        self._first_spare = self._spare_before = self.spare
        self.tries, self._may_grow = 0, True

    @property
    def predicted_bytes(self) -> float:
        """Bytes that a prediction may take."""
        return (1 - self.spare) * self.budget_bytes - self.beside_bytes

    @property
    def has_tries(self) -> bool:
        return self.tries < TRIES

    def least_budget(self, peak_bytes: int) -> int:
        """Return the budget that has just enough room for a step of this peak, as a first choice."""
        return ceil((peak_bytes + self.beside_bytes) / (1 - self._first_spare))

    def may_hold(self, peak_bytes: int) -> bool:
        """Say whether a step of this peak may run, with nothing left free."""
        return peak_bytes + self.beside_bytes <= self.budget_bytes

    def shrink(self, most_bytes: int) -> None:
        """Take that a step needed more than the budget."""
        self.beside_bytes += ceil(most_bytes - self.budget_bytes + MARGIN * self.budget_bytes)
        self._may_grow = False

    def grow(self, most_bytes: int) -> bool:
        """Take what a step needed that kept to the budget, and say whether predictions may take more now."""
        left = self.budget_bytes - most_bytes
        if not self._may_grow or not self.spare or not self.has_tries or left < WORTH * self.budget_bytes:
            return False
        self._spare_before, self.spare = self.spare, max(0.0, self.spare - TAKEN * left / self.budget_bytes)
        return True

    def end_growth(self) -> None:
        """Take that a step needed too much behind a growth, whose choice before comes back."""
        self._may_grow, self.spare = False, self._spare_before

    def lacked_bytes(self) -> int:
        """Return what a step counts as that found no memory."""
        most_bytes = (1 + self._short) * self.budget_bytes
        self._short *= 2
        return round(most_bytes)
