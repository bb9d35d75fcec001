"""Attention over packed tokens as an operator: its axes, and its gradient.

    packed_attention: query, key, value, bounds(, seed)(, bias) -> output, log-sum-exp

Rows of query, key and value are tokens, of one sequence behind the other. Bounds have four numbers for each row: the
first key that it sees and the one behind the last, then the first row that sees its key and the one behind the last.
They are whole numbers in float32, which holds all up to 2^24. The log-sum-exp is in base 2.

The mask of dropped weights follows from a seed. It is a dropout mask itself, of as many elements as a seed has bits, of
which half are 1: so it is drawn, kept and handed to backward as any other mask is.

A relative bias is added to scores, and has one number for each head and distance, key minus query: of distances from
-reach to reach, so there is an odd number. Pairs that are further apart have the number of the nearest end. It is
float32, or float64 beside operands of that type, and its gradient is a sum over all pairs of each distance.
"""

from collections.abc import Mapping

from autotuner.errors import GraphError
from autotuner.ir.derivatives import Derivative, HandedOn
from autotuner.ir.graph import Operator

BITS_OF_SEED = 64
BOUNDS = 3
"""Place among the inputs of a forward."""
NUMBERS_PER_ROW = 4
"""Of bounds."""
ATTRIBUTES = {"row_axis": str, "feature_axis": str, "factor": float, "dropped": float, "cap": float}
"""Axes of query, key and value; what scores are multiplied with; the share of the weights that is dropped; and the cap
of the scores, as cap tanh(scores / cap), 0 for none."""
ROWS_MAX = 2**24


def gradient(o: Operator, grad: str) -> tuple[Derivative | HandedOn, ...]:
    """Return the operator that makes the gradients of query, key and value."""
    query, key, value, *rest = o.input_axes
    out, statistic = o.output_axes
    read = ",".join([out, query, key, value, out, statistic, *rest])
    inputs = (grad, *o.inputs[:3], *o.outputs, *o.inputs[3:])
    made = Derivative("packed_attention_grad", f"{read}->{query},{key},{value}", inputs, (0, 1, 2), o.attributes)
    place = bias_place(o)
    if place is None:
        return (made,)
    spec = f"{read}->{o.input_axes[place]}"
    return made, Derivative("packed_attention_grad_bias", spec, inputs, (place,), o.attributes)


def bias_place(o: Operator) -> int | None:
    """Return the place of a relative bias among the inputs of a forward, or None."""
    place = BOUNDS + 1 + (o.attribute("dropped") != 0.0)
    return place if len(o.inputs) > place else None


def check_axes(operator: Operator) -> None:
    """Check that the operands of a forward have axes that go together.

    Raises:
        GraphError: they have not.
    """
    rows, features = (str(operator.attribute(name)) for name in ("row_axis", "feature_axis"))
    counts = len(operator.input_axes), len(operator.output_axes)
    query, key, value, bounds, *_ = (*operator.input_axes, *[""] * 4)
    out, statistic, *_ = (*operator.output_axes, *[""] * 2)
    own = {axis for axis in query if axis not in (rows, features)}
    place = bias_place(operator)
    fits = (
        counts in ((4, 2), (5, 2), (6, 2))
        and all(len(axes) == 3 and {rows, features} < set(axes) for axes in (query, key, value, out))
        and set(key) == set(value)
        and set(out) == set(query)
        and set(statistic) == own | {rows}
        and bounds[:1] == rows
        and len(bounds) == 2
        and (place is None or (len(axes := set(operator.input_axes[place])) == 2 and axes & set(query) == own))
    )
    if not fits:
        raise GraphError(
            f"operator {operator.name!r}: spec {operator.spec!r} does not fit a packed_attention: query, key, value "
            f"and output have heads, rows {rows!r} and features {features!r}, bounds have rows and another axis, the "
            "log-sum-exp has heads and rows, a bias heads and distances; write it like "
            '"tnp,tnp,tnp,tc,z,nd->tnp,nt"'
        )


def check_extents(operator: Operator, extents: Mapping[str, int]) -> None:
    """Check how many rows, heads, bounds and bits of a seed there are.

    Raises:
        GraphError: there are others than can be.
    """
    rows, features = (str(operator.attribute(name)) for name in ("row_axis", "feature_axis"))
    query, key, _, bounds, *further = operator.input_axes
    place = bias_place(operator)
    seed = further if place is None else further[:-1]
    heads, shared = (next(extents[axis] for axis in axes if axis not in (rows, features)) for axes in (query, key))
    wrong = None
    if extents[bounds[1]] != NUMBERS_PER_ROW:
        wrong = f"bounds have {NUMBERS_PER_ROW} numbers for each row, not {extents[bounds[1]]}"
    elif heads % shared:
        wrong = f"{heads} heads of queries cannot share {shared} of keys"
    elif extents[rows] > ROWS_MAX:
        wrong = f"there are {extents[rows]:,} rows: {ROWS_MAX:,} are possible"
    elif seed and [extents[axis] for axis in seed[0]] != [BITS_OF_SEED]:
        wrong = f"a seed has {BITS_OF_SEED} elements"
    elif bool(seed) != (operator.attribute("dropped") != 0.0):
        wrong = "a seed is read where weights are dropped, and nowhere else"
    elif place is not None:
        (distances,) = (extents[axis] for axis in operator.input_axes[place] if axis not in query)
        if distances % 2 == 0:
            wrong = f"a bias has as many distances ahead as behind, and that of 0: an odd number, not {distances}"
    if wrong is not None:
        raise GraphError(f"operator {operator.name!r}: {wrong}")
