"""Attention over packed tokens as one kernel, forward and backward: by torch, and by this project's Triton programs.

Its masks of dropped weights follow from a seed: a dropout mask of as many elements as that has bits, half of them 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod

from autotuner.ir.formats import RAW
from autotuner.ir.kinds import ELEMENT_BYTES
from autotuner.ir.records import Candidate, Node, Subgraph
from autotuner.kernels.geometry import HALVES, forms_by_number, operand_letters
from autotuner.kernels.registry import KERNELS, Kernel
from autotuner.kernels.rules.attention_triton import MOST_HEADS, MOST_OFFSET, dropped_by_bits
from autotuner.kernels.rules.packed_tiles import unfit_tiles


@dataclass(frozen=True)
class PackedSettings:
    """Settings of an operator of attention.

    Args:
        is_gradient: whether it is the backward.
        factor: of the scores.
        dropped: the share of the weights that is dropped.
        cap: of the scores; 0 for none.
        further: inputs behind the bounds: a seed where weights are dropped, then perhaps a relative bias.
    """

    is_gradient: bool
    factor: float
    dropped: float
    cap: float
    further: int

    @property
    def numbers(self) -> tuple[float, float, float]:
        """Factor, dropped share and cap, as kernels take them."""
        return self.factor, self.dropped, self.cap

    @property
    def bounds(self) -> int:
        """Place of the bounds among the inputs."""
        return 6 if self.is_gradient else 3

    @property
    def seed(self) -> int | None:
        """Place of the seed among the inputs, if there is one."""
        return self.bounds + 1 if self.dropped else None

    @property
    def bias(self) -> int | None:
        """Place of the relative bias among the inputs, if there is one."""
        place = self.bounds + 1 + bool(self.dropped)
        return place if self.further > place - self.bounds - 1 else None


@dataclass(frozen=True)
class HeadsOutermost:
    """Orders of axes: in `reads`, operands become (heads, rows, features); in `back`, results lie as the spec says.

    By `bias`, a relative bias or its gradient becomes (heads, distances), and comes back.
    """

    reads: tuple[tuple[int, ...], ...]
    back: tuple[tuple[int, ...], ...]
    bias: tuple[int, ...] = ()


def settings_of(node: Node) -> PackedSettings:
    """Return what an operator says."""
    known = dict(node.attributes)
    is_gradient = node.kind != "packed_attention"
    factor, dropped, cap = (float(known[name]) for name in ("factor", "dropped", "cap"))
    return PackedSettings(is_gradient, factor, dropped, cap, len(node.inputs) - (7 if is_gradient else 4))


def heads_outermost(node: Node) -> HeadsOutermost:
    """Return the orders of an operator's operands; statistics have no features."""
    letters, settings = operand_letters(node), settings_of(node)
    reads, makes = letters[: settings.bounds], letters[len(node.inputs) :]
    bias: tuple[int, ...] = ()
    if settings.bias is not None:
        bias = (0, 1) if letters[settings.bias][0] in letters[0] else (1, 0)
    if node.kind == "packed_attention_grad_bias":
        return HeadsOutermost(tuple(_order(node, axes) for axes in reads), (bias,), bias)
    orders = [_order(node, axes) for axes in makes]
    back = tuple(tuple(order.index(place) for place in range(len(order))) for order in orders)
    return HeadsOutermost(tuple(_order(node, axes) for axes in reads), back, bias)


def _order(node: Node, axes: str) -> tuple[int, ...]:
    """Return the places of heads, rows and features in the letters of an operand."""
    known = dict(node.attributes)
    behind = [str(known[name]) for name in ("row_axis", "feature_axis")]
    heads = [axis for axis in axes if axis not in behind]
    return tuple(axes.index(axis) for axis in (*heads, *behind) if axis in axes)


def packed_layouts(subgraph: Subgraph) -> Iterator[tuple[str, ...]]:
    """Enumerate query, key and value as declared, with rows first, and with heads first; others lie as declared."""
    (node,) = subgraph.nodes
    first = 1 if settings_of(node).is_gradient else 0
    projected = dict(zip(node.inputs[first:], heads_outermost(node).reads[first : first + 3], strict=False))
    for places in (None, (1, 0, 2), (0, 1, 2)):
        yield tuple(
            "".join(subgraph.tensors[number].axes[projected[number][place]] for place in places)
            if places is not None and number in projected
            else subgraph.tensors[number].axes
            for number in subgraph.boundary
        )


def scattered(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say which operand the programs do not read or write as it lies, or None if they take all."""
    (node,) = subgraph.nodes
    forms, letters = forms_by_number(subgraph, candidate), operand_letters(node)
    feature = str(dict(node.attributes)["feature_axis"])
    for number, axes in zip((*node.inputs, *node.outputs), letters, strict=True):
        tensor, form = subgraph.tensors[number], forms.get(number)
        if form is None or form.is_absent:
            continue
        if form.is_flat or form.storage != RAW:
            return f"it reads and writes numbers; tensor {number} is stored as {form}"
        strides, _, _ = form.placed(tensor.axes, tensor.extents)
        if feature not in axes:
            if str(form) != tensor.axes:
                return f"tensor {number} lies as it is declared; {form} does not"
        elif strides[axes.index(feature)] != 1:
            return f"features lie side by side; those of tensor {number} do not in {form}"
        elif max((extent - 1) * stride for extent, stride in zip(tensor.extents, strides, strict=True)) > MOST_OFFSET:
            return f"it counts at most {MOST_OFFSET:,} elements; tensor {number} reaches further in {form}"
    return None


def not_packed(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why the Triton programs do not compute this, or None if they do."""
    (node,) = subgraph.nodes
    settings, letters = settings_of(node), operand_letters(node)
    place = 1 if settings.is_gradient else 0
    query = subgraph.tensors[node.inputs[place]]
    if query.dtype not in (*HALVES, "float32"):
        return f"it computes in {', '.join(HALVES)} or float32; the query is {query.dtype}"
    heads = query.extents[_order(node, letters[0])[0]]
    if heads > MOST_HEADS:
        return f"it launches at most {MOST_HEADS:,} heads; these are {heads:,}"
    numbers = 1 if settings.bias is None else prod(subgraph.tensors[node.inputs[settings.bias]].extents)
    if numbers > MOST_OFFSET:
        return f"it counts at most {MOST_OFFSET:,} elements; the bias has {numbers:,}"
    features = query.extents[letters[place].index(str(dict(node.attributes)["feature_axis"]))]
    return unfit_tiles(
        node.kind, dict(candidate.params), features, ELEMENT_BYTES[query.dtype],
        drops=settings.dropped > 0, biased=settings.bias is not None,
    ) or scattered(subgraph, candidate)  # fmt: skip


_TORCH, _TRITON = "autotuner.kernels.torch.packed_attention", "autotuner.kernels.triton.packed_attention"
_kernel = partial(
    Kernel, layouts=packed_layouts, anchors=True, merges=False, pitched=True, drops=dropped_by_bits,
    consistent=f"{_TORCH}:made_up",
)  # fmt: skip
KERNELS.add(
    _kernel("torch_packed_attention", ("packed_attention",), f"{_TORCH}:operator", scattered),
    _kernel("torch_packed_attention_grad", ("packed_attention_grad",), f"{_TORCH}:operator", scattered),
    _kernel("torch_packed_attention_grad_bias", ("packed_attention_grad_bias",), f"{_TORCH}:operator", scattered),
    _kernel("triton_packed_attention", ("packed_attention",), f"{_TRITON}:operator", not_packed, compiles=True),
    _kernel("triton_packed_attention_grad", ("packed_attention_grad",), f"{_TRITON}:operator_grad", not_packed,
            compiles=True),
    _kernel("triton_packed_attention_grad_bias", ("packed_attention_grad_bias",), f"{_TRITON}:operator_grad_bias",
            not_packed, compiles=True),
)  # fmt: skip
