"""Letters of a region's axes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autotuner.runtime.capture.axes import Axis, UnknownError, extent
from autotuner.runtime.capture.side_by_side import Run

_COMMON_FIRST = "blhnpkfgrstuvwxyzacdeijmoq"
_LETTERS = _COMMON_FIRST + _COMMON_FIRST.upper()
LETTERS_FIRST = len(_COMMON_FIRST)
"""Letters that most regions do with: batch, length and hidden size come first."""
LETTERS_MAX = len(_LETTERS)


class LettersError(UnknownError):
    """A region has more axes than there are letters."""


@dataclass
class Letters:
    """Letters by axis, given out in order of appearance; axes that have the same one are `merged`.

    Axes of a run are parts of one axis, side by side wherever one of them is: they have one letter, that of the first.
    There are `count` letters.
    """

    merged: Mapping[Axis, Axis]
    count: int = LETTERS_FIRST
    runs: Mapping[Axis, Run] = field(default_factory=dict)
    of: dict[Axis, str] = field(default_factory=dict)

    def __call__(self, axes: Iterable[Axis]) -> str:
        axes = [axis for axis in self.stand_for(axes) if self._run(axis)[0] is axis]
        for axis in axes:
            if axis not in self.of:
                if len(self.of) == self.count:
                    raise LettersError(f"it has more than {self.count} axes")
                self.of[axis] = _LETTERS[len(self.of)]
        return "".join(self.of[axis] for axis in axes)

    def stand_for(self, axes: Iterable[Axis]) -> list[Axis]:
        return [self.merged.get(axis, axis) for axis in axes]

    def dims(self, axes: Sequence[Axis]) -> tuple[Run, ...]:
        """Return axes as dimensions, one for each letter."""
        found: list[Run] = []
        for axis, stands_for in zip(axes, self.stand_for(axes), strict=True):
            if self._run(stands_for)[0] is stands_for:
                found.append((axis,))
            else:
                found[-1] += (axis,)
        return tuple(found)

    def extents(self) -> dict[str, int]:
        return {letter: extent(self._run(axis)) for axis, letter in self.of.items()}

    def _run(self, axis: Axis) -> Run:
        return self.runs.get(axis, (axis,))
