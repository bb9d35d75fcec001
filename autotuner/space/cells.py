"""A cell: one kernel on operands in the same forms, and all combinations of launch parameters that it admits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product

from autotuner.checkpoint import checkpoint
from autotuner.ir.records import Attributes, Call, Scalar
from autotuner.kernels import KERNELS


@dataclass(frozen=True)
class Cell:
    """All calls that differ in launch parameters alone.

    Args:
        call: any of them, without its parameters: subgraph, kernel and forms.
        lists: the values of each parameter, which multiply out.
        trials: how many combinations are tried at most, where not all are.
    """

    call: Call
    lists: tuple[tuple[str, tuple[Scalar, ...]], ...]
    trials: int

    @property
    def key(self) -> str:
        return self.call.key

    @property
    def kernel(self) -> str:
        return self.call.candidate.kernel

    def called(self, params: Attributes) -> Call:
        """Return the call with these parameters."""
        return Call(self.call.subgraph, replace(self.call.candidate, params=params))

    def admits(self, params: Attributes) -> bool:
        """Tell whether the kernel can run with these parameters."""
        candidate = replace(self.call.candidate, params=params)
        return KERNELS[self.kernel].refuses(self.call.subgraph, candidate) is None

    def exceeds(self, combinations: int) -> bool:
        """Tell whether the kernel admits more combinations than this; asks it no further than needed."""
        return sum(1 for _ in islice(self._admitted(), combinations + 1)) > combinations

    @cached_property
    def combinations(self) -> tuple[Attributes, ...]:
        """Every combination that the kernel admits, in the order of the lists."""
        return tuple(self._admitted())

    @cached_property
    def starts(self) -> tuple[Attributes, ...]:
        """The combinations to begin with: the first, last and middle value of every list, as far as admitted.

        Where none of the three is, the first combination that is.
        """
        places = (lambda _: 0, lambda count: count - 1, lambda count: count // 2)
        found = (tuple((name, values[place(len(values))]) for name, values in self.lists) for place in places)
        admitted = tuple(params for params in dict.fromkeys(found) if self.admits(params))
        return admitted or tuple(islice(self._admitted(), 1))

    def _admitted(self) -> Iterator[Attributes]:
        return (params for params in multiplied(self.lists) if self.admits(params))


def multiplied(lists: tuple[tuple[str, tuple[Scalar, ...]], ...]) -> Iterator[Attributes]:
    """Yield every combination of parameters; the last list varies fastest."""
    names = tuple(name for name, _ in lists)
    for values in product(*(values for _, values in lists)):
        checkpoint()
        yield tuple(zip(names, values, strict=True))


def without_params(call: Call) -> Call:
    """Return a call without its launch parameters, whose key is that of its cell."""
    return replace(call, candidate=replace(call.candidate, params=())) if call.candidate.params else call
