"""Operator kinds: spec, results, class, flop, gradient, fusion and operand ranges of each, declared in one table.

A pattern writes one symbol per operand. X: all axes, in one order. M: as X, a dropout mask. N: as X, of any type. S:
some of X's, a vector. H: the normalised axes, some of X's. R: X without H. Where a pattern has R and no H, H is the
attribute `axis`, or what R leaves of X. D: any axes; the tensor lies in declared order. A: any axes, in any order; the
kind itself says which go together.

`*` stands for any number of operands, of which each is X or S, as its axes are; `D*` for any number of D.

A norm may lack its bias, or both scale and bias: it is of the same kind, and its spec is shorter by these operands.

A rotary embedding is y = x * cos + rotate_half(x) * sin, where rotate_half(x) is (-x2, x1) of the halves of `axis`.
Cosines and sines are constants, and may be any numbers. A row mask is a constant of ones and zeros, a factor of rows.

The operands of an operator have one element type, but for statistics (R) and what a norm has normalised (N), and its
results have it too. A `cast` and a `normalised` have a result of another type: that of their attribute `dtype`.
Operators that carry a program have the types of its text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from autotuner.errors import GraphError
from autotuner.ir import derivatives, packed_attention, programmed
from autotuner.ir.derivatives import Gradient
from autotuner.ir.graph import Operator
from autotuner.ir.records import ELEMENT_BYTES as ELEMENT_BYTES

OperatorClass = Literal["contraction", "normalisation", "element-wise"]
Product = Literal["value", "mask", "statistic", "optional statistic"]

Sides = tuple[tuple[str, ...], tuple[str, ...]]
"""The symbols of a pattern's inputs and of its outputs."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Declaration of an operator kind; its reference implementation is in `autotuner.kernels.reference`.

    Args:
        name: as operators state it.
        example: a spec, for people.
        pattern: which operands have which axes; "" for a contraction, whose spec is free.
        shorter: patterns of the same kind without some of the operands; each has another number of operands.
        operator_class: as in Data Movement Is All You Need; normalisations are those that reduce along an axis.
        flop_per_element: per element of X, a transcendental function counted as one; contractions are counted apart.
        attributes: name and type of each; all are mandatory. One named `axis`, or like `key_axis`, is a letter of X.
        makes: one per output. A statistic is at least float32; masks and statistics are auxiliary.
        gradient: given a forward operator and the gradient of its first output, the backward operators that it needs;
            None for a kind of backward operators.
        fusible: the generic compiler may fuse it with its neighbours.
        fused_alone: the generic compiler is also tried on the operator alone.
        ranges: from and to, of the values that are made up for an input when kernels are measured; others are normal.
            Inputs are counted as in `pattern`; shorter patterns lack none behind these.
        even: the extent of the attribute `axis` must be even, since the kind tells its two halves apart.
        placewise: one place along an axis of the result follows from the same place of the operands, so that a part of
            the result can be made alone.
        shown: its result is in memory wherever only products read it, since what fuses with these reads it from there.
        computed_wide: kernels compute it in float32 whatever the type, and round the result once; casts around it that
            say so are left out when a model is read.
        by_rows: the row kernels of CUDA devices have an expression of it.
        commutative: its two operands may change places where they have the same axes.
        inlined: it becomes a part of an expression, or of a program, that alone reads its result.
        cheap: it is not worth a region: what such operators alone make for several layers is made once, outside.
        drops_weights: it drops attention's weights itself, by a mask that it reads.
        stands_for: so many operators do its work where it is written out; each rounds its results.
        stem: what its results are called in a model that is read from a module; its own name where this is "".
        statistics: what its further results are called there.
        roles: what its operands are called there, by place; the others are inputs.
        first_values: what a parameter is filled with at first, by its place; others are random.
    """

    name: str
    example: str
    pattern: str
    operator_class: OperatorClass
    flop_per_element: int
    attributes: Mapping[str, type] = field(default_factory=dict)
    makes: tuple[Product, ...] = ("value",)
    gradient: Gradient | None = None
    _: KW_ONLY
    fusible: bool = True
    fused_alone: bool = False
    ranges: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    even: bool = False
    shorter: tuple[str, ...] = ()
    placewise: bool = False
    shown: bool = False
    computed_wide: bool = False
    by_rows: bool = False
    commutative: bool = False
    inlined: bool = False
    cheap: bool = False
    drops_weights: bool = False
    stands_for: int = 1
    stem: str = ""
    statistics: tuple[str, ...] = ()
    roles: Mapping[int, str] = field(default_factory=dict)
    first_values: Mapping[int, float] = field(default_factory=dict)

    def sides(self, inputs: Sequence[str], outputs: Sequence[str]) -> Sides:
        """Return the symbols of the inputs and of the outputs of an operator whose operands have these axes."""
        found = [_sides(pattern) for pattern in (self.pattern, *self.shorter)]
        best = min(found, key=lambda sides: (len(sides[0]) != len(inputs), len(sides[1]) != len(outputs)))
        whole = max((*inputs, *outputs), key=len, default="")
        read, made = (
            _repeated(side, axes, whole) if any("*" in symbol for symbol in side) else side
            for side, axes in zip(best, (inputs, outputs), strict=True)
        )
        return read, made

    def places(self, symbols: str, inputs: Sequence[str], outputs: Sequence[str]) -> tuple[int, ...]:
        """Return the operands, counted over inputs and then outputs, whose symbol is one of these."""
        of_inputs, of_outputs = self.sides(inputs, outputs)
        return tuple(place for place, symbol in enumerate(of_inputs + of_outputs) if symbol in symbols)

    def ranges_of(self, inputs: int) -> Mapping[int, tuple[float, float]]:
        """Return the ranges by input of an operator that has so many."""
        lacking = len(_sides(self.pattern)[0]) - inputs if self.shorter else 0
        return {place - lacking: ends for place, ends in self.ranges.items()}

    @property
    def reads_input_again(self) -> bool:
        """True where it is a function of one operand, which its gradient reads."""
        return self.gradient is derivatives.of_input

    @property
    def keeps_axes(self) -> bool:
        """True where an output has all axes; else they are summed onto fewer, as in the gradient of a parameter."""
        return not {"X", "M", "N", "D", "D*", "A"}.isdisjoint(_sides(self.pattern)[1])


def _sides(pattern: str) -> Sides:
    inputs, _, outputs = pattern.partition("->")
    return tuple(inputs.split(",")) if inputs else (), tuple(outputs.split(",")) if outputs else ()


def _repeated(side: tuple[str, ...], axes: Sequence[str], whole: str) -> tuple[str, ...]:
    """Return a symbol for each of the operands that `*` or `D*` stands for."""
    if side == ("D*",):
        return ("D",) * len(axes)
    return tuple("X" if len(own) == len(whole) else "S" for own in axes)


_POSITIVE = (0.5, 1.5)
"""Range of a reciprocal deviation, and of a reciprocal root mean square."""
_WAVE = (-1.0, 1.0)
"""Range of a cosine or sine."""
_ANGLES = {1: _WAVE, 2: _WAVE}

KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("contraction", "blh,nph->blnp", "", "contraction", 2, gradient=derivatives.contraction, fusible=False,
             placewise=True, shown=True, stem="product", roles={1: "weight"}),
        Kind("bias", "blnp,np->blnp", "X,S->X", "element-wise", 1, gradient=derivatives.bias, placewise=True,
             shown=True, by_rows=True, cheap=True, roles={1: "vector"}, first_values={1: 0.0}),
        Kind("scale", "bnqk->bnqk", "X->X", "element-wise", 1, {"factor": float}, gradient=derivatives.scale,
             placewise=True, by_rows=True, inlined=True, cheap=True),
        Kind("cast", "blh->blh", "X->X", "element-wise", 1, {"dtype": str}, gradient=derivatives.cast,
             placewise=True, shown=True, by_rows=True, inlined=True, cheap=True),
        Kind("mask", "bnqk,bk->bnqk", "X,S->X", "element-wise", 1, gradient=derivatives.mask, placewise=True,
             cheap=True, stem="masked", roles={1: "over"}),
        Kind("causal_mask", "bnqk->bnqk", "X->X", "element-wise", 1, {"query_axis": str, "key_axis": str},
             gradient=derivatives.mask, stem="masked"),
        Kind("window_mask", "bnqk->bnqk", "X->X", "element-wise", 1,
             {"query_axis": str, "key_axis": str, "before": int, "after": int}, gradient=derivatives.mask,
             stem="masked"),
        Kind("row_mask", "bqnp,bq->bqnp", "X,S->X", "element-wise", 1, gradient=derivatives.row_mask,
             ranges={1: (0.0, 1.0)}),
        Kind("softmax", "bnqk->bnqk,bnq", "X->X,R", "normalisation", 5, {"axis": str}, ("value", "optional statistic"),
             gradient=derivatives.softmax, computed_wide=True, stem="attention", statistics=("logsumexp",)),
        Kind("sink_softmax", "bnqk,n->bnqk,bnq", "X,S->X,R", "normalisation", 6, {"axis": str}, ("value", "statistic"),
             gradient=derivatives.softmax, fused_alone=True, computed_wide=True, stem="attention",
             statistics=("logsumexp",), roles={1: "sink"}, first_values={1: 0.0}),
        Kind("gelu_erf", "blf->blf", "X->X", "element-wise", 5, gradient=derivatives.of_input, placewise=True,
             computed_wide=True, by_rows=True, inlined=True),
        Kind("gelu_tanh", "blf->blf", "X->X", "element-wise", 9, gradient=derivatives.of_input, placewise=True,
             computed_wide=True, by_rows=True, inlined=True),
        Kind("relu", "blf->blf", "X->X", "element-wise", 1, gradient=derivatives.relu, placewise=True,
             computed_wide=True, by_rows=True, inlined=True),
        Kind("silu", "blf->blf", "X->X", "element-wise", 4, gradient=derivatives.of_input, placewise=True,
             computed_wide=True, by_rows=True, inlined=True),
        Kind("dropout_mask", "->blf", "->M", "element-wise", 2, {"p": float}, ("mask",),
             gradient=derivatives.dropout_mask, fusible=False, stem="mask"),
        Kind("dropout", "blf,blf->blf", "X,M->X", "element-wise", 1, {"p": float}, gradient=derivatives.dropout,
             by_rows=True),
        Kind("add", "blh,blh->blh", "X,X->X", "element-wise", 1, gradient=derivatives.add, placewise=True,
             by_rows=True, commutative=True),
        Kind("multiply", "blf,blf->blf", "X,X->X", "element-wise", 1, gradient=derivatives.multiply, placewise=True,
             by_rows=True, inlined=True, cheap=True),
        Kind("rotary", "blnp,lp,lp->blnp", "X,S,S->X", "element-wise", 3, {"axis": str}, gradient=derivatives.rotary,
             fused_alone=True, ranges=_ANGLES, even=True, shown=True, inlined=True, roles={1: "cosine", 2: "sine"}),
        Kind("layer_norm", "blh,h,h->blh,bl,bl", "X,H,H->X,R,R", "normalisation", 7, {"epsilon": float},
             ("value", "statistic", "statistic"), gradient=derivatives.layer_norm, fused_alone=True,
             shorter=("X,H->X,R,R", "X->X,R,R"), shown=True, by_rows=True, stem="norm",
             statistics=("mean", "reciprocal_deviation"), roles={1: "scale", 2: "bias"}, first_values={1: 1.0, 2: 0.0}),
        Kind("rms_norm", "blh,h->blh,bl", "X,H->X,R", "normalisation", 4, {"epsilon": float}, ("value", "statistic"),
             gradient=derivatives.rms_norm, fused_alone=True, shorter=("X->X,R",), shown=True, by_rows=True,
             statistics=("reciprocal_root",), roles={1: "scale"}, first_values={1: 1.0}),
        Kind("pointwise", "blnp,np->blnp", "*->X", "element-wise", 1, {"program": str}, gradient=derivatives.pointwise,
             fused_alone=True, placewise=True, shown=True, cheap=True),
        Kind("program", "blf->bnf", "D*->D", "normalisation", 1, {"program": str}, gradient=derivatives.program,
             fused_alone=True, shown=True, cheap=True),
        Kind("packed_attention", "tnp,tnp,tnp,tc,z,nd->tnp,nt", "A,A,A,R,R,R->A,R", "normalisation", 8,
             packed_attention.ATTRIBUTES, ("value", "statistic"), gradient=packed_attention.gradient, fusible=False,
             shorter=("A,A,A,R,R->A,R", "A,A,A,R->A,R"), shown=True, drops_weights=True, stands_for=4, stem="attention",
             statistics=("logsumexp",), roles={3: "bounds", 4: "bias", 5: "bias"}),
        Kind("packed_attention_grad", "tnp,tnp,tnp,tnp,tnp,nt,tc,z,nd->tnp,tnp,tnp", "A,A,A,A,A,R,R,R,R->A,A,A",
             "normalisation", 20, packed_attention.ATTRIBUTES, ("value", "value", "value"), fusible=False,
             shorter=("A,A,A,A,A,R,R,R->A,A,A", "A,A,A,A,A,R,R->A,A,A"), drops_weights=True, stands_for=6),
        Kind("packed_attention_grad_bias", "tnp,tnp,tnp,tnp,tnp,nt,tc,z,nd->nd", "A,A,A,A,A,R,R,R,R->R",
             "normalisation", 14, packed_attention.ATTRIBUTES, ("statistic",), fusible=False,
             shorter=("A,A,A,A,A,R,R,R->R",), drops_weights=True, stands_for=4),
        Kind("choice", "te->tk", "D*->D", "normalisation", 1, {"program": str}, gradient=derivatives.choice,
             fusible=False),
        Kind("pointwise_grad", "blnp,blnp,np->blnp", "*->X", "element-wise", 2, {"program": str, "wrt": int},
             fused_alone=True),
        Kind("pointwise_sum", "blnp,blnp,np->np", "*->S", "normalisation", 2, {"program": str, "wrt": int},
             fused_alone=True),
        Kind("program_grad", "bnf,blf->blf", "D*->D*", "normalisation", 2, {"program": str}, fused_alone=True),
        Kind("normalised", "blh,bl,bl->blh", "X,R,R->N", "element-wise", 2, {"dtype": str}, fused_alone=True,
             shorter=("X,R->N",), ranges={2: _POSITIVE}, by_rows=True),
        Kind("normalised_grad_input", "blh,blh,h,bl->blh", "X,N,H,R->X", "normalisation", 8,
             {"centred": bool}, fused_alone=True, ranges={3: _POSITIVE}, shorter=("X,N,R->X",), by_rows=True),
        Kind("normalised_grad_parameters", "blh,blh->h,h", "X,N->H,H", "normalisation", 3, makes=("value", "value"),
             fused_alone=True, shorter=("X,N->H",), by_rows=True),
        Kind("bias_grad", "blf->f", "X->S", "normalisation", 1, by_rows=True),
        Kind("softmax_grad", "bnqk,bnqk,bnq->bnqk", "X,X,R->X", "normalisation", 4, {"axis": str}),
        Kind("sink_grad", "bnqk,bnqk,bnq,n->n", "X,X,R,S->S", "normalisation", 4, {"axis": str}, fused_alone=True),
        Kind("gelu_erf_grad", "blf,blf->blf", "X,X->X", "element-wise", 11, by_rows=True),
        Kind("gelu_tanh_grad", "blf,blf->blf", "X,X->X", "element-wise", 18, by_rows=True),
        Kind("relu_grad", "blf,blf->blf", "X,X->X", "element-wise", 1, by_rows=True),
        Kind("silu_grad", "blf,blf->blf", "X,X->X", "element-wise", 8, by_rows=True),
        Kind("rotary_grad", "blnp,lp,lp->blnp", "X,S,S->X", "element-wise", 3, {"axis": str},
             fused_alone=True, ranges=_ANGLES, even=True),
        Kind("layer_norm_grad_input", "blh,blh,h,bl,bl->blh", "X,X,H,R,R->X", "normalisation", 10,
             fused_alone=True, ranges={4: _POSITIVE}, shorter=("X,X,R,R->X",), by_rows=True),
        Kind("layer_norm_grad_parameters", "blh,blh,bl,bl->h,h", "X,X,R,R->H,H", "normalisation", 5,
             makes=("value", "value"), fused_alone=True, ranges={3: _POSITIVE}, shorter=("X,X,R,R->H",),
             by_rows=True),
        Kind("rms_norm_grad_input", "blh,blh,h,bl->blh", "X,X,H,R->X", "normalisation", 7,
             fused_alone=True, ranges={3: _POSITIVE}, shorter=("X,X,R->X",), by_rows=True),
        Kind("rms_norm_grad_parameters", "blh,blh,bl->h", "X,X,R->H", "normalisation", 3,
             fused_alone=True, ranges={2: _POSITIVE}, by_rows=True),
    )
}  # fmt: skip


SOFTMAXES = ("softmax", "sink_softmax")
"""Kinds that make attention's weights of scores."""


def kind_of(operator: Operator) -> Kind:
    """Return the kind of an operator.

    Raises:
        GraphError: no such kind.
    """
    if operator.kind not in KINDS:
        raise GraphError(f"operator {operator.name!r}: no kind {operator.kind!r}; known: {', '.join(KINDS)}")
    return KINDS[operator.kind]


def draws(kind: str) -> bool:
    """Tell whether operators of a kind draw random numbers: dropout masks."""
    return kind in KINDS and "mask" in KINDS[kind].makes


def types_made(operator: Operator, dtypes: Sequence[str]) -> tuple[str, ...]:
    """Return the element types of an operator's outputs, given those of its inputs.

    Raises:
        GraphError: the inputs have several types, or a cast is to none that is known.
    """
    kind = kind_of(operator)
    if "dtype" in kind.attributes:
        wanted = str(operator.attribute("dtype"))
        if wanted not in ELEMENT_BYTES:
            known = ", ".join(ELEMENT_BYTES)
            raise GraphError(
                f"operator {operator.name!r}: a {kind.name} to {wanted!r}, which is no dtype; known: {known}"
            )
        return (wanted,)
    if kind.name in programmed.PROGRAMMED:
        return programmed.types(operator, tuple(dtypes))
    symbols = kind.sides(operator.input_axes, operator.output_axes)[0] or ("X",) * len(dtypes)
    found = {dtype: tensor for tensor, dtype, symbol in zip(operator.inputs, dtypes, symbols, strict=True)
             if symbol not in ("R", "N")}  # fmt: skip
    if len(found) > 1:
        said = " and ".join(f"{tensor!r} is {dtype}" for dtype, tensor in found.items())
        raise GraphError(
            f"operator {operator.name!r}: {said}; a {kind.name} has operands of one type: put a cast between"
        )
    (dtype,) = found
    statistic = "float64" if dtype == "float64" else "float32"
    return tuple(statistic if product.endswith("statistic") else dtype for product in products_of(operator))


def products_of(operator: Operator) -> tuple[Product, ...]:
    """Return what an operator's outputs are."""
    makes = kind_of(operator).makes
    return (makes + makes[-1:] * len(operator.outputs))[: len(operator.outputs)]
