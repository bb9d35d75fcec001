"""Tolerances: the distance that a kernel's result may have from the float64 reference, in one table, with reasons.

A value may differ from the reference `r` by

    relative * |r| + (relative + accumulation * sqrt(K)) * rms(r)

    relative     = ulps * epsilon of the output's dtype * number of operators covered, a program's calls each counted,
                   and of attention in one operator those that it stands for
    accumulation = SUM_ULPS * epsilon of the type that sums are kept in
    K            = the longest sum in any covered operator

The share of the root mean square is there because a value near zero is the difference of large ones: its error has the
scale of its terms, not its own.
"""

from dataclasses import dataclass
from math import prod, sqrt

from autotuner.ir.kinds import KINDS
from autotuner.ir.programmed import PROGRAMMED, programmed
from autotuner.ir.records import Node, Subgraph
from autotuner.kernels.geometry import has_program, letter_extents, operand_letters
from autotuner.kernels.rules.elementwise import normalised

# Rounding errors of a sum of K random terms grow as sqrt(K) when they are independent, which blocked and vectorised
# sums are close to; 8 covers the constant and the largest of millions of elements.
SUM_ULPS = 8.0


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Distance to the next number at 1, rounding steps granted to one operator, and the step of its sums' type."""

    epsilon: float
    ulps: float
    sum_epsilon: float


TOLERANCES = {
    # The reference itself is float64, so both sides round.
    "float64": Tolerance(2.0**-52, 64.0, 2.0**-52),
    # exp, erf and tanh of vector libraries are good to 4 ulp; exp turns an error in a score of size 8 into 8 ulp more.
    "float32": Tolerance(2.0**-23, 32.0, 2.0**-23),
    # Results are rounded once per operator, to half an ulp, and an operator may be preceded by a rounded intermediate
    # that it amplifies a few times. Sums are kept in float32.
    "float16": Tolerance(2.0**-10, 4.0, 2.0**-23),
    "bfloat16": Tolerance(2.0**-7, 4.0, 2.0**-23),
}


def allowed(subgraph: Subgraph, dtype: str) -> tuple[float, float]:
    """Return the factors of |r| and of rms(r) for an output of a dtype.

    Of several operators, one may have rounded to a coarser type what another reads.
    """
    made = {subgraph.tensors[number].dtype for node in subgraph.nodes for number in node.outputs}
    inside = made & set(TOLERANCES) if len(subgraph.nodes) > 1 else set()
    programs = [programmed(node.kind, node.attributes) for node in subgraph.nodes if node.kind in PROGRAMMED]
    inside = inside.union(*(each.program.dtypes for each in programs))
    tolerance = max((TOLERANCES[name] for name in {dtype, *inside}), key=lambda each: each.epsilon)
    stands_for = (KINDS[node.kind].stands_for if node.kind in KINDS else 1 for node in subgraph.nodes)
    count = sum(stands_for) + sum(each.steps - 1 for each in programs)
    relative = tolerance.ulps * tolerance.epsilon * count
    longest = max(terms(subgraph, node) for node in subgraph.nodes)
    return relative, relative + SUM_ULPS * tolerance.sum_epsilon * sqrt(longest)


def terms(subgraph: Subgraph, node: Node) -> int:
    """Return how many terms the longest sum in an operator has; 1 where it has none."""
    if has_program(node):  # which may sum anything that it reads
        return max(prod(subgraph.tensors[number].extents) for number in (*node.inputs, *node.outputs))
    letters = operand_letters(node)
    extents = letter_extents(subgraph, node)
    if node.kind.startswith("packed_attention"):  # over the keys of a row, or the rows and heads that share a key
        return prod(extents[letter] for letter in letters[0] if letter != dict(node.attributes)["feature_axis"])
    kept = set("".join(letters[len(node.inputs) :]))
    summed = {letter for letter in extents if letter not in kept}
    if node.kind in KINDS and KINDS[node.kind].keeps_axes:
        summed |= set(normalised(node))
    return prod(extents[letter] for letter in summed)
