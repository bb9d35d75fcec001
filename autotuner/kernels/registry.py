"""The registry of kernels.

An implementation is a builder, named by dotted path so that a registry can be read without torch:

    build(call, inputs, outputs) -> run

`inputs` and `outputs` are tensors in the order of the subgraph's boundary, axes in declared order; a layout shows only
in their strides; an absent one is None. A mask stored as bits or as a seed is a row of uint8 or one int64, whatever its
axes. The builder makes its views once; `run()` does the work. It writes every element of every output and copies no
operand in secret.

>>> import autotuner.kernels.rules  # registers every kernel
>>> from autotuner.kernels import KERNELS
>>> kernel = KERNELS["torch_matmul_bias"]
>>> kernel.covers, kernel.runs
(('contraction', 'bias'), 'autotuner.kernels.torch.contraction:matmul_plus')
"""

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

from autotuner.errors import AutotunerError, KernelError
from autotuner.ir.device import NVIDIA
from autotuner.ir.formats import FORMATS
from autotuner.ir.numerics import Numerics
from autotuner.ir.records import Call, Candidate, Subgraph
from autotuner.kernels.geometry import may_be_stored
from autotuner.kernels.patterns import Operators, Pattern

Builder = Callable[..., Callable[[], Any]]
Refuses = Callable[[Subgraph, Candidate], str | None]


_NVIDIA_ALONE = tuple(f"autotuner.kernels.{library}." for library in ("cublaslt", "cudnn", "cupy"))
"""Implementations by libraries of NVIDIA's, and in CUDA C++."""


def never_refuses(_subgraph: Subgraph, _candidate: Candidate) -> str | None:
    """Say why this candidate cannot run, or None if it can: it always can."""
    return None


def as_asked(p: float) -> float:
    """Return the share that is dropped where p is asked for: p."""
    return p


def declared_layouts(subgraph: Subgraph) -> Iterator[tuple[str, ...]]:
    """Enumerate one assignment: every tensor as it is declared."""
    yield tuple(subgraph.tensors[number].axes for number in subgraph.boundary)


def _as_stored(name: str, refuses: Refuses, flat: tuple[str, ...]) -> Refuses:
    """Put before a rule that operands have strides, or a flat storage format that the kernel takes, and that no
    operator does more with an operand than its storage format tells."""

    def refuses_stored(subgraph: Subgraph, candidate: Candidate) -> str | None:
        for number, text in zip(subgraph.boundary, candidate.forms, strict=False):
            _, colon, storage = text.rpartition(":")
            if not colon or storage not in FORMATS:
                continue
            if FORMATS[storage].is_flat and storage not in flat:
                return f"{name} reads and writes tensors by their strides, and {text} has none"
            if not may_be_stored(subgraph, number, storage):
                return f"{name} does more with tensor {number} than {text} tells"
        return refuses(subgraph, candidate)

    return refuses_stored


@dataclass(frozen=True)
class Kernel:
    """One implementation, covering one operator or several.

    Args:
        name: unique; what a search space and a candidate call it.
        covers: operator kinds in graph order, as people are told; () where its patterns find many.
        runs: dotted path of the builder, "package.module:function".
        refuses: says in a sentence why a candidate cannot run, or None.
        version: raised when what it computes or how it is timed changes, so that older measurements are not used.
        compiles: building it invokes a compiler, so it is built ahead of timing.
        consistent: dotted path of a function (subgraph, inputs) -> None that fills in inputs which depend on others
            (a log-sum-exp, say) when inputs are made up for measuring; "" where any values do.
        numerics: "exact" up to rounding, or "unbiased" where it draws random numbers.
        needs: the class of numerics that a request has to allow for it: spaces have it only then.
        rounds: dotted path of a function (subgraph, operands) -> operands, which rounds operands in float64 as it does
            before it computes with them: its results are verified against what is computed from these; "" where it
            reads them as they are.
        drops: the share that it drops where p is asked for, up to chance.
        layouts: enumerates the forms of the boundary tensors that it can take, as texts in boundary order.
        anchors: its layouts say which ones are worth having; other kernels follow the layouts that anchors leave.
        merges: what it executes depends on memory order alone, so candidates that agree in it are measured once.
        pitched: it takes slices of stacked tensors, whose rows lie further apart than their length.
        flat: storage formats without strides that it takes; it refuses the others.
        patterns: sets of operators that it may cover; without any, those of the kinds that it covers.
        partner: a kernel without which it is not tried, because one reads what only the other writes.
    """

    name: str
    covers: tuple[str, ...]
    runs: str
    refuses: Refuses = never_refuses
    _: KW_ONLY
    version: int = 1
    compiles: bool = False
    consistent: str = ""
    numerics: str = "exact"
    needs: Numerics = "exact"
    rounds: str = ""
    drops: Callable[[float], float] = as_asked
    layouts: Callable[[Subgraph], Iterator[tuple[str, ...]]] = declared_layouts
    anchors: bool = False
    merges: bool = True
    pitched: bool = False
    flat: tuple[str, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    partner: str = ""

    def __post_init__(self) -> None:
        if self.covers and not self.patterns:
            object.__setattr__(self, "patterns", (Operators(self.covers),))
        object.__setattr__(self, "refuses", _as_stored(self.name, self.refuses, self.flat))

    def refuses_vendor(self, vendor: str) -> str | None:
        """Say why it cannot run on devices of a vendor, or None if it can."""
        if vendor == NVIDIA or not self.runs.startswith(_NVIDIA_ALONE):
            return None
        return f"{self.name} needs a device of NVIDIA, and this one's vendor is {vendor!r}"

    def misfit(self, call: Call) -> str | None:
        """Say why a call from a file, where anything may stand, cannot run by the kernel's rules, or None."""
        subgraph, candidate = call.subgraph, call.candidate
        wrong = f"{self.name} does not compute {' + '.join(subgraph.kinds)} from operands like these"
        if not Counter(self.covers) <= Counter(subgraph.kinds):  # operators that it repeats come on top
            return wrong
        try:
            for number, form in zip(subgraph.boundary, candidate.parsed_forms(), strict=True):
                tensor = subgraph.tensors[number]
                if not form.is_absent:
                    form.stored(tensor.dtype, tensor.axes, tensor.extents)
            reason = self.refuses(subgraph, candidate)
        except AutotunerError as error:
            return str(error)
        except (ArithmeticError, AssertionError, AttributeError, LookupError, StopIteration, TypeError, ValueError):
            return wrong  # the rule was asked about what its kernel does not cover
        return reason and f"{self.name} cannot run: {reason}"

    def builder(self) -> Builder:
        """Import and return the implementation."""
        return load(self.runs)  # type: ignore[no-any-return]


def load(path: str) -> Any:
    """Import "package.module:function"."""
    module, _, function = path.partition(":")
    return getattr(importlib.import_module(module), function)


class Registry:
    """Kernels by name: a taken name raises, a missing one lists what is known."""

    def __init__(self) -> None:
        self._kernels: dict[str, Kernel] = {}

    def add(self, *kernels: Kernel) -> None:
        for kernel in kernels:
            if kernel.name in self._kernels:
                running = self._kernels[kernel.name].runs
                raise KernelError(f"kernel {kernel.name!r} is registered already, running {running}")
            self._kernels[kernel.name] = kernel

    def __getitem__(self, name: str) -> Kernel:
        if name not in self._kernels:
            raise KernelError(f"no kernel {name!r}; known: {', '.join(sorted(self._kernels))}")
        return self._kernels[name]

    def __contains__(self, name: str) -> bool:
        return name in self._kernels

    def __iter__(self) -> Iterator[Kernel]:
        return iter(self._kernels.values())


KERNELS = Registry()
