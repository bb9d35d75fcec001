"""Parts of an axis that are side by side wherever one of them is: they can be one axis.

A model that turns a quarter of each head by its position takes that quarter off, which splits the axis of a head.
Where a program computes the rest, which has no axes, no operator knows of the split: a head can be one axis again. Then
the kernels of attention find it, since they read an axis of heads and one of features.

Axes that nobody has split, such as batch and positions, stay as they are: equal layers are equal, whatever is around.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from autotuner.runtime.capture.axes import Axis

Run = tuple[Axis, ...]


def runs_of(
    lists: Iterable[Sequence[Axis]],
    alike: Sequence[tuple[Sequence[Axis], Sequence[Axis]]],
    neighbours: Collection[tuple[Axis, Axis]],
) -> dict[Axis, Run]:
    """Return the longest runs of axes that are side by side, in one order, in every list that has one of them.

    Args:
        lists: axes of tensors as operators name them, without those along which one place is taken.
        alike: pairs of lists of equal length, both lists too. They name the axes of one tensor, so that what is a run
            in one of them is a run in the other.
        neighbours: pairs that may be joined, since they are parts of one axis, one right behind the other.

    Returns:
        Runs of two axes or more, by each of their axes.
    """
    behind: dict[Axis, Axis | None] = {}
    before: dict[Axis, Axis | None] = {}
    for each in (*lists, *(each for pair in alike for each in pair)):
        for axis, one, other in zip(each, (None, *each), (*each[1:], None), strict=False):
            if before.setdefault(axis, one) is not one:
                before[axis] = None
            if behind.setdefault(axis, other) is not other:
                behind[axis] = None
    joined = {(one, other) for one, other in neighbours if behind.get(one) is other and before[other] is one}
    changed = True
    while changed:  # each turn takes a pair away
        changed = False
        for pair in alike:
            for mine, theirs in zip(*map(pairwise, pair), strict=True):
                if (mine in joined) != (theirs in joined):
                    joined -= {mine, theirs}
                    changed = True
    after = dict(joined)
    runs: dict[Axis, Run] = {}
    for first in after.keys() - set(after.values()):
        run = [first]
        while run[-1] in after:
            run.append(after[run[-1]])
        runs |= dict.fromkeys(run, tuple(run))
    return runs
