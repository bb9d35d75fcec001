"""Every operator kind: what its spec must look like, what it makes, its class and its flop per element.

A pattern writes one symbol per operand. X: all axes, in one order. S: some of X's. H: the normalised axes, some of X's.
R: X without H. Where a pattern has R and no H, H is the attribute `axis`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autotuner.errors import GraphError
from autotuner.ir.graph import Operator
from autotuner.ir.records import names_axis

OperatorClass = Literal["contraction", "normalisation", "element-wise"]
Product = Literal["value", "mask", "statistic", "optional statistic"]

ELEMENT_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True, slots=True)
class Kind:
    """What all operators of one kind share.

    Args:
        name: as operators state it.
        example: a spec, for people.
        pattern: which operands have which axes; "" for a contraction, whose spec is free.
        operator_class: as in Data Movement Is All You Need; normalisations are those that reduce along an axis.
        flop_per_element: per element of X, a transcendental function counted as one; contractions are counted apart.
        attributes: name and type of each; all are mandatory. One named `axis`, or like `key_axis`, is a letter of X.
        makes: one per output. A mask has the model's dtype and a statistic at least float32; both are auxiliary.
    """

    name: str
    example: str
    pattern: str
    operator_class: OperatorClass
    flop_per_element: int
    attributes: Mapping[str, type] = field(default_factory=dict)
    makes: tuple[Product, ...] = ("value",)


_VALUE_AND_STATISTICS: tuple[Product, ...] = ("value", "statistic", "statistic")

KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("contraction", "blh,nph->blnp", "", "contraction", 2),
        Kind("bias", "blnp,np->blnp", "X,S->X", "element-wise", 1),
        Kind("scale", "bnqk->bnqk", "X->X", "element-wise", 1, {"factor": float}),
        Kind("mask", "bnqk,bk->bnqk", "X,S->X", "element-wise", 1),
        Kind("causal_mask", "bnqk->bnqk", "X->X", "element-wise", 1, {"query_axis": str, "key_axis": str}),
        Kind("softmax", "bnqk->bnqk,bnq", "X->X,R", "normalisation", 5, {"axis": str}, ("value", "optional statistic")),
        Kind("gelu_erf", "blf->blf", "X->X", "element-wise", 5),
        Kind("gelu_tanh", "blf->blf", "X->X", "element-wise", 9),
        Kind("relu", "blf->blf", "X->X", "element-wise", 1),
        Kind("dropout_mask", "->blf", "->X", "element-wise", 2, {"p": float}, ("mask",)),
        Kind("dropout", "blf,blf->blf", "X,X->X", "element-wise", 1, {"p": float}),
        Kind("add", "blh,blh->blh", "X,X->X", "element-wise", 1),
        Kind("layer_norm", "blh,h,h->blh,bl,bl", "X,H,H->X,R,R", "normalisation", 7, {"epsilon": float},
             _VALUE_AND_STATISTICS),
        Kind("bias_grad", "blf->f", "X->S", "normalisation", 1),
        Kind("softmax_grad", "bnqk,bnqk,bnq->bnqk", "X,X,R->X", "normalisation", 4, {"axis": str}),
        Kind("gelu_erf_grad", "blf,blf->blf", "X,X->X", "element-wise", 11),
        Kind("gelu_tanh_grad", "blf,blf->blf", "X,X->X", "element-wise", 18),
        Kind("relu_grad", "blf,blf->blf", "X,X->X", "element-wise", 1),
        Kind("layer_norm_grad_input", "blh,blh,h,bl,bl->blh", "X,X,H,R,R->X", "normalisation", 10),
        Kind("layer_norm_grad_parameters", "blh,blh,bl,bl->h,h", "X,X,R,R->H,H", "normalisation", 5,
             makes=("value", "value")),
    )
}  # fmt: skip


def kind_of(operator: Operator) -> Kind:
    """Return the kind of an operator.

    Raises:
        GraphError: no such kind.
    """
    if operator.kind not in KINDS:
        raise GraphError(f"operator {operator.name!r}: no kind {operator.kind!r}; known: {', '.join(KINDS)}")
    return KINDS[operator.kind]


def check_operator(operator: Operator) -> None:
    """Check that an operator's kind, spec and attributes fit together.

    Raises:
        GraphError: they do not; the message names operator, axis, and what would fit.
    """
    kind = kind_of(operator)
    _check_attributes(operator, kind)
    for axes in operator.input_axes + operator.output_axes:
        if not axes.isascii() or not axes.islower() or not axes.isalpha():
            raise _misfit(operator, kind, f"axes {axes!r} must be letters a-z")
        repeated = [axis for axis, times in Counter(axes).items() if times > 1]
        if repeated:
            raise _misfit(operator, kind, f"axis {repeated[0]!r} occurs twice in {axes!r}")
    if kind.name == "contraction":
        _check_contraction(operator, kind)
    else:
        _check_pattern(operator, kind)


def _check_attributes(operator: Operator, kind: Kind) -> None:
    given = dict(operator.attributes)
    if set(given) != set(kind.attributes):
        raise GraphError(
            f"operator {operator.name!r}: a {kind.name} has the attributes {sorted(kind.attributes)}, "
            f"not {sorted(given)}"
        )
    for name, wanted in kind.attributes.items():
        if type(given[name]) is not wanted:
            raise GraphError(
                f"operator {operator.name!r}: attribute {name} of a {kind.name} is a {wanted.__name__}, "
                f"not {given[name]!r}"
            )


def _check_contraction(operator: Operator, kind: Kind) -> None:
    operands = operator.input_axes + operator.output_axes
    if len(operator.input_axes) != 2 or len(operator.output_axes) != 1:
        raise _misfit(operator, kind, "it needs two inputs and one output")
    for axis, times in Counter("".join(operands)).items():
        if times == 1:
            raise _misfit(operator, kind, f"axis {axis!r} occurs in one operand only; each belongs to two or three")


def _check_pattern(operator: Operator, kind: Kind) -> None:
    sides = [tuple(text.split(",")) if text else () for text in kind.pattern.split("->")]
    if (len(sides[0]), len(sides[1])) != (len(operator.input_axes), len(operator.output_axes)):
        raise _misfit(operator, kind, f"it needs {len(sides[0])} inputs and {len(sides[1])} outputs")
    symbols = list(zip(sides[0] + sides[1], operator.input_axes + operator.output_axes, strict=True))
    whole = next(axes for symbol, axes in symbols if symbol == "X")
    bound = {"X": whole}
    named = {name: str(operator.attribute(name)) for name in kind.attributes if names_axis(name)}
    for name, axis in named.items():
        if len(axis) != 1 or axis not in whole:
            raise _misfit(operator, kind, f"attribute {name} {axis!r} is none of the axes {whole!r}")
    if len(set(named.values())) < len(named):
        raise _misfit(operator, kind, f"its attributes {' and '.join(named)} name one axis; each wants its own")
    if "axis" in named:
        bound["H"] = named["axis"]
    # H before R, which follows from it.
    for symbol, axes in sorted(symbols, key=lambda pair: pair[0] == "R"):
        if symbol == "R":
            bound["R"] = "".join(axis for axis in whole if axis not in bound["H"])
        if axes != bound.setdefault(symbol, axes):
            raise _misfit(operator, kind, f"axes {axes!r} must be {bound[symbol]!r}")
        foreign = [axis for axis in axes if axis not in whole]
        if foreign:
            raise _misfit(operator, kind, f"axis {foreign[0]!r} is none of the axes {whole!r}")


def _misfit(operator: Operator, kind: Kind, reason: str) -> GraphError:
    return GraphError(
        f"operator {operator.name!r}: spec {operator.spec!r} does not fit a {kind.name}: {reason}; "
        f'write it like "{kind.example}"'
    )
