"""Attention as one kernel, and layer norm's whole backward as one."""

import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import islice
from math import floor

from autotuner.ir.records import Candidate, Subgraph, TensorType
from autotuner.ir.scores import cap_of
from autotuner.kernels.geometry import HALVES, forms_by_number, operand_letters
from autotuner.kernels.heads import head_operands, score_axes
from autotuner.kernels.patterns import Attention, AttentionGrad
from autotuner.kernels.registry import KERNELS, Kernel, Refuses, as_asked
from autotuner.kernels.rules.elementwise import axis_not_contiguous, dropout_masks, same_layouts, statistics_too_narrow

_IMPLEMENTATION = "autotuner.kernels.torch.attention"
_FLASH = "autotuner.kernels.torch.attention_flash"
_CUDNN = "autotuner.kernels.cudnn.attention"
_EFFICIENT = "autotuner.kernels.torch.attention_efficient"
_MASKS = "autotuner.kernels.torch.attention_masks"
_NORM_GRAD = ("layer_norm_grad_input", "layer_norm_grad_parameters")
_NORM_GRADS = "autotuner.kernels.torch.elementwise:layer_norm_grad"

FORWARD = ("contraction", "scale", "softmax", "contraction")
CAUSAL_FORWARD = ("contraction", "scale", "causal_mask", "softmax", "contraction")
MASKED_FORWARD = ("contraction", "scale", "mask", "softmax", "contraction")
BIASED_FORWARD = ("contraction", "scale", "bias", "softmax", "contraction")
BIASED_CAUSAL_FORWARD = ("contraction", "scale", "bias", "causal_mask", "softmax", "contraction")
BIASED_MASKED_FORWARD = ("contraction", "scale", "bias", "mask", "softmax", "contraction")
MASKED_CAUSAL_FORWARD = ("contraction", "scale", "mask", "causal_mask", "softmax", "contraction")
WINDOW_FORWARD = ("contraction", "scale", "window_mask", "softmax", "contraction")
MASKED_WINDOW_FORWARD = ("contraction", "scale", "mask", "window_mask", "softmax", "contraction")
CAPPED_WINDOW_FORWARD = ("contraction", "scale", "pointwise", "window_mask", "softmax", "contraction")
CAPPED_FORWARD = ("contraction", "scale", "pointwise", "softmax", "contraction")
CAPPED_CAUSAL_FORWARD = ("contraction", "scale", "pointwise", "causal_mask", "softmax", "contraction")
CAPPED_MASKED_FORWARD = ("contraction", "scale", "pointwise", "mask", "softmax", "contraction")
"""With a soft cap of the scores, which is an expression."""
BACKWARD = ("contraction", "contraction", "softmax_grad", "scale", "contraction", "contraction")
DROPPING = ("dropout_mask", "dropout")
"""Between the softmax and the second contraction, where attention weights are dropped."""
GRADIENTS = {
    "scale": "scale", "dropout": "dropout", "bias": "bias_grad", "pointwise": "pointwise_grad",
    "sink_softmax": "sink_grad",
}  # fmt: skip
"""Backward kinds of what may stand between the two contractions, beside that of any softmax; masks have none."""


def attention_grad(kinds: tuple[str, ...], *, frozen: Collection[str] = ()) -> AttentionGrad:
    """Return the pattern of the backward of attention of some kinds; of these, what is frozen gets no gradient."""
    always = tuple(kind for kind in BACKWARD if kind != "scale")
    other = (GRADIENTS[kind] for kind in kinds if kind in GRADIENTS and kind not in frozen)
    return AttentionGrad((*always, *other), kinds)


FROZEN = ((), ("bias",), ("sink_softmax",), ("bias", "sink_softmax"))
"""Operators of attention whose own operand may need no gradient."""


def attention_grads(forwards: Iterable[tuple[str, ...]]) -> tuple[AttentionGrad, ...]:
    """Return the patterns of the backward of all these."""
    found = (attention_grad(kinds, frozen=frozen) for kinds in forwards for frozen in FROZEN)
    return tuple(dict.fromkeys(found))


def attentions(forwards: Iterable[tuple[str, ...]]) -> tuple[Attention, ...]:
    """Return the patterns of attention of all these kinds."""
    return tuple(Attention(kinds) for kinds in forwards)


def variants(*forwards: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return kinds of attention with a scale and without, with dropped weights and without."""
    return tuple(
        (*(kind for kind in kinds[:-1] if scaled or kind != "scale"), *drop, kinds[-1])
        for scaled in (True, False)
        for kinds in forwards
        for drop in ((), DROPPING)
    )


def with_sinks(*forwards: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the same kinds of attention, each with sinks."""
    return tuple(tuple("sink_softmax" if kind == "softmax" else kind for kind in kinds) for kinds in forwards)


def cap_of_scores(subgraph: Subgraph) -> float | None:
    """Return c where scores are capped by c tanh(x / c), None where they are not, or by another expression."""
    node = next((node for node in subgraph.nodes if node.kind == "pointwise"), None)
    return None if node is None else cap_of(str(dict(node.attributes)["program"]))


ADDED = ("mask", "bias")
"""Kinds that add something to the scores."""

MOST_FEATURES = 128
"""Of a head; FlashAttention and cuDNN take more in forward than in backward."""

VECTOR_ELEMENTS = {**dict.fromkeys(HALVES, 8), "float32": 4}
"""Elements that memory-efficient attention loads at once: every row of a head, and of an added mask, is so many, or a
multiple."""


FLASH_OFF = 0.02
"""FlashAttention drops whole 256ths, as it does for the framework; it may miss so much of what is dropped, or kept."""


def dropped_share(subgraph: Subgraph) -> float:
    """Return p of attention's dropout, 0 where it has none."""
    return next((float(dict(node.attributes)["p"]) for node in subgraph.nodes if node.kind == "dropout"), 0.0)


def dropped_by_flash(p: float) -> float:
    """Return the share of weights that FlashAttention drops: it keeps random bytes of at most 255 (1 - p), in float32.

    Source: `p_dropout_in_uint8_t` in flash_api.cpp and dropout.h of FlashAttention 2.
    """
    kept = _single(1 - _single(p))
    return 1 - (floor(255 * kept) + 1) / 256


def _single(number: float) -> float:
    return float(struct.unpack("f", struct.pack("f", number))[0])


def attention_layouts(subgraph: Subgraph) -> Iterator[tuple[str, ...]]:
    """Enumerate what a library's attention reads as it lies: query, key and value with rows or heads first.

    They may also lie as they are declared, and what is added to the scores may, or has its keys last. What attention
    writes, and what backward reads of that, is as declared.
    """
    projected = subgraph.inputs[1:4] if backward_of(subgraph) else subgraph.inputs[:3]
    operands = head_operands(subgraph)
    own = [(each.declared, each.rows_first, each.heads_first) for each in (operands[number] for number in projected)]
    for added in _orders_of_added(subgraph):
        for orders in dict.fromkeys(zip(*own, strict=True)):
            order = dict(zip(projected, orders, strict=True))
            yield tuple(
                _in_order(subgraph.tensors[number].axes, operands[number].declared, order[number])
                if number in order
                else added.get(number, subgraph.tensors[number].axes)
                for number in subgraph.boundary
            )


def _in_order(axes: str, declared: str, order: str) -> str:
    """Return the axes of a tensor, whose letters in an operator are `declared`, in another order of these letters."""
    return "".join(axes[declared.index(letter)] for letter in order)


def _orders_of_added(subgraph: Subgraph) -> list[dict[int, str]]:
    """Return the orders of what is added to the scores, and of its gradient: as the scores lie, and as declared."""
    number, places = added_mask(subgraph)
    if number is None:
        return [{}]
    declared = subgraph.tensors[number].axes  # a mask beside a bias stays as it is declared
    along = "".join(declared[place] for place in places if place is not None)
    slopes = (n for node in subgraph.nodes if node.kind == "bias_grad" for n in node.outputs)
    alike = (number, *slopes)
    return [dict.fromkeys(alike, order) for order in dict.fromkeys((along, declared))]


def library_layouts(storage: str) -> Callable[[Subgraph], Iterator[tuple[str, ...]]]:
    """Return `attention_layouts` with the mask of dropped weights, where there is one, in a library's own format."""

    def layouts(subgraph: Subgraph) -> Iterator[tuple[str, ...]]:
        masks = dropout_masks(subgraph)
        for row in attention_layouts(subgraph):
            yield tuple(
                f"{text}:{storage}" if number in masks else text
                for number, text in zip(subgraph.boundary, row, strict=True)
            )

    return layouts


def not_for_cuda(storage: str) -> Refuses:
    """Return the rule of a CUDA library's attention."""
    unfit = {"efficient": _not_efficient, "flash": _not_flash}.get(storage, _not_halves)

    def refuses(subgraph: Subgraph, candidate: Candidate) -> str | None:
        reason = batch_of_two(subgraph) or unfit(subgraph, candidate)
        if reason:
            return reason
        forms = forms_by_number(subgraph, candidate)
        for number in dropout_masks(subgraph) & set(forms):
            if forms[number].storage != storage:
                return f"its mask is of its own generator, {storage}; {forms[number]} is not"
        return features_scattered(subgraph, candidate)

    return refuses


def query_of(subgraph: Subgraph) -> TensorType:
    """Return the query of attention, forward or backward."""
    return subgraph.tensors[subgraph.inputs[1 if backward_of(subgraph) else 0]]


def _not_halves(subgraph: Subgraph, _candidate: Candidate) -> str | None:
    """Say why FlashAttention or cuDNN does not compute with these operands, or None if it does."""
    query = query_of(subgraph)
    if query.dtype not in HALVES:
        return f"it computes in {' or '.join(HALVES)}; the query is {query.dtype}"
    if query.extents[-1] % 8 or query.extents[-1] > MOST_FEATURES:
        return f"it takes heads of 8, 16, ... {MOST_FEATURES} features; these have {query.extents[-1]}"
    return None


def _not_flash(subgraph: Subgraph, candidate: Candidate) -> str | None:
    p = dropped_share(subgraph)
    dropped = dropped_by_flash(p)
    if abs(dropped - p) > FLASH_OFF * min(p, 1 - p):
        return f"it drops whole 256ths of the weights: {dropped:.6g} where p is {p:g}"
    return _not_halves(subgraph, candidate) or _not_rows_first(subgraph, candidate)


def _not_rows_first(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say which operand torch's backward would copy, since it reads batch, rows, heads, features; None if none."""
    if not backward_of(subgraph):
        return None
    forms, operands = forms_by_number(subgraph, candidate), head_operands(subgraph)
    for number in (subgraph.inputs[0], subgraph.inputs[4]):
        wanted = _in_order(subgraph.tensors[number].axes, operands[number].declared, operands[number].rows_first)
        if str(forms[number]) != wanted:
            return f"the library copies tensor {number}: it reads {wanted}, and this lies as {forms[number]}"
    return None


def _not_efficient(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why memory-efficient attention does not compute with these operands, or would copy one; None if it does."""
    query = query_of(subgraph)
    if query.dtype not in VECTOR_ELEMENTS:
        return f"it computes in {', '.join(VECTOR_ELEMENTS)}; the query is {query.dtype}"
    step = VECTOR_ELEMENTS[query.dtype]
    if query.extents[-1] % step:
        return f"it takes heads of a multiple of {step} features in {query.dtype}; these have {query.extents[-1]}"
    if score_axes(subgraph).group:
        return "it takes as many heads of keys as of queries"
    forms = forms_by_number(subgraph, candidate)
    copied = _not_rows_first(subgraph, candidate)
    if copied:
        return copied
    number, added_along = added_mask(subgraph)
    if number is None:
        return None
    added = subgraph.tensors[number]
    strides, _, _ = forms[number].placed(added.axes, added.extents)
    *others, keys = (None if axis is None else (strides[axis], added.extents[axis]) for axis in added_along)
    if added.dtype != query.dtype:
        return f"it adds a mask of the query's type, {query.dtype}; this one is {added.dtype}"
    if keys is None or keys[0] != 1:
        return f"it adds a mask whose keys are contiguous; this one lies as {forms[number]}"
    if keys[1] % step or any(axis[0] % step for axis in others if axis):
        return f"it loads {step} keys of an added mask at once; the rows of this one have {keys[1]}"
    return None


Added = tuple[int | None, tuple[int | None, ...]]
"""The number of a mask or bias that attention adds to its scores, and its axis along each of these: batch (one, or
two), heads (one, or two), rows and keys. None stands for no mask, and for an axis that it does not have."""


def added_mask(subgraph: Subgraph) -> Added:
    """Return the mask or bias that attention adds, the first of two."""
    return next(_all_added(subgraph), (None, ()))


def mask_beside_bias(subgraph: Subgraph) -> Added:
    """Return the mask that attention adds beside a bias."""
    return next(islice(_all_added(subgraph), 1, None), (None, ()))


def _all_added(subgraph: Subgraph) -> Iterator[Added]:
    for node in subgraph.nodes:
        if node.kind in ADDED:
            whole, own = operand_letters(node)[:2]
            places = (own.find(letter) for letter in whole)
            yield node.inputs[1], tuple(None if place < 0 else place for place in places)


def batch_of_two(subgraph: Subgraph) -> str | None:
    """Say why a library's attention does not run over a batch of two axes, such as images and windows; None for one."""
    axes = score_axes(subgraph)
    return None if len(axes.batch) == 1 else f"it takes one axis of a batch; this one has {len(axes.batch)}"


def backward_of(subgraph: Subgraph) -> bool:
    """Tell attention's backward, whose first input is the gradient of its output, from its forward."""
    return "softmax_grad" in subgraph.kinds


def features_scattered(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why a library's attention would copy an operand, or None if it takes all as they lie."""
    forms = forms_by_number(subgraph, candidate)
    for number, heads, features in _heads_and_features(subgraph):
        if number not in forms:
            continue
        tensor = subgraph.tensors[number]
        strides, _, _ = forms[number].placed(tensor.axes, tensor.extents)
        if strides[features] != 1:
            return f"the library copies tensor {number}: features are not contiguous in {forms[number]}"
        if len(heads) > 1 and strides[heads[0]] != strides[heads[1]] * tensor.extents[heads[1]]:
            return f"heads of tensor {number} do not act as one axis in {forms[number]}"
    gradient = subgraph.inputs[0]
    if backward_of(subgraph) and str(forms[gradient]) != subgraph.tensors[gradient].axes:
        return f"the library copies its output's gradient: it lies as {forms[gradient]}, not as it is declared"
    return None


def _heads_and_features(subgraph: Subgraph) -> Iterator[tuple[int, list[int], int]]:
    """Yield query, key, value and output, in backward the output's gradient too: number, and where it has its heads and
    its features."""
    for number, operand in head_operands(subgraph).items():
        if number not in subgraph.outputs or not backward_of(subgraph):
            heads = [operand.declared.index(letter) for letter in operand.heads]
            yield number, heads, operand.declared.index(operand.features)


def layer_norm_grad_layouts(subgraph: Subgraph) -> Iterator[tuple[str, ...]]:
    """Enumerate as for one of its two members: every layout of the wide operands."""
    first = subgraph.nodes[0]
    alone = Subgraph((first,), subgraph.tensors, first.inputs, first.outputs)
    for row in same_layouts(alone):
        forms = dict(zip(alone.boundary, row, strict=True))
        wide = forms[first.inputs[0]]
        yield tuple(
            forms.get(n, wide if len(subgraph.tensors[n].axes) == len(wide) else subgraph.tensors[n].axes)
            for n in subgraph.boundary
        )


def _not_plain(subgraph: Subgraph, candidate: Candidate) -> str | None:
    return batch_of_two(subgraph) or features_scattered(subgraph, candidate)


_plain = partial(
    Kernel, refuses=_not_plain, layouts=attention_layouts, anchors=True, merges=False, pitched=True
)  # fmt: skip
_plain_grad = partial(_plain, consistent=f"{_IMPLEMENTATION}:fill_in_statistics")


def _library(storage: str) -> Callable[..., Kernel]:
    """Return how the kernels of a library are made that has its mask in this format."""
    return partial(
        Kernel, covers=(), refuses=not_for_cuda(storage), layouts=library_layouts(storage), anchors=True, merges=False,
        pitched=True, flat=(storage,), drops=dropped_by_flash if storage == "flash" else as_asked,
    )  # fmt: skip


_flash, _cudnn, _efficient = _library("flash"), _library("cudnn"), _library("efficient")
_UNMASKED = variants(FORWARD, CAUSAL_FORWARD)
_ADDING = variants(
    FORWARD,
    CAUSAL_FORWARD,
    MASKED_FORWARD,
    MASKED_CAUSAL_FORWARD,
    BIASED_FORWARD,
    WINDOW_FORWARD,
    MASKED_WINDOW_FORWARD,
)
"""With a mask or a bias that is added to the scores, which backward reads again, and with a window, which is one."""

KERNELS.add(
    _plain("torch_flash_attention", FORWARD, f"{_IMPLEMENTATION}:forward",
           patterns=(Attention(FORWARD),), partner="torch_flash_attention_grad"),
    _plain_grad("torch_flash_attention_grad", BACKWARD, f"{_IMPLEMENTATION}:backward",
                patterns=(attention_grad(FORWARD),), partner="torch_flash_attention"),
    _plain("torch_flash_attention_causal", CAUSAL_FORWARD, f"{_IMPLEMENTATION}:forward",
           patterns=(Attention(CAUSAL_FORWARD),), partner="torch_flash_attention_causal_grad"),
    _plain_grad("torch_flash_attention_causal_grad", BACKWARD, f"{_IMPLEMENTATION}:backward",
                patterns=(attention_grad(CAUSAL_FORWARD),), partner="torch_flash_attention_causal"),
    _flash("cuda_flash_attention", runs=f"{_FLASH}:forward", numerics="unbiased",
           version=2,  # until 2, its mask was held to p exactly
           patterns=attentions(_UNMASKED), partner="cuda_flash_attention_grad"),
    _flash("cuda_flash_attention_grad", runs=f"{_FLASH}:backward", consistent=f"{_MASKS}:fill_in_flash",
           patterns=attention_grads(_UNMASKED), partner="cuda_flash_attention"),
    _cudnn("cudnn_attention", runs=f"{_CUDNN}:forward", numerics="unbiased",
           patterns=attentions(_UNMASKED), partner="cudnn_attention_grad"),
    _cudnn("cudnn_attention_grad", runs=f"{_CUDNN}:backward", consistent=f"{_MASKS}:fill_in_cudnn",
           patterns=attention_grads(_UNMASKED), partner="cudnn_attention"),
    _efficient("cuda_efficient_attention", runs=f"{_EFFICIENT}:forward", numerics="unbiased",
               patterns=attentions(_ADDING), partner="cuda_efficient_attention_grad"),
    _efficient("cuda_efficient_attention_grad", runs=f"{_EFFICIENT}:backward", consistent=f"{_MASKS}:fill_in_efficient",
               patterns=attention_grads(_ADDING), partner="cuda_efficient_attention"),
    Kernel("torch_layer_norm_grad", _NORM_GRAD, _NORM_GRADS, statistics_too_narrow, layouts=layer_norm_grad_layouts),
    Kernel("cuda_layer_norm_grad", _NORM_GRAD, _NORM_GRADS, axis_not_contiguous, layouts=layer_norm_grad_layouts),
)  # fmt: skip
