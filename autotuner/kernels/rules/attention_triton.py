"""Attention by this project's own Triton programs, whose dropout leaves its mask as bits."""

from functools import partial
from math import log2, prod

from autotuner.ir.kinds import ELEMENT_BYTES
from autotuner.ir.records import Candidate, Subgraph, TensorType
from autotuner.kernels.geometry import HALVES, forms_by_number, letter_extents
from autotuner.kernels.heads import head_operands, score_axes
from autotuner.kernels.registry import KERNELS, Kernel
from autotuner.kernels.rules.attention import (
    BIASED_CAUSAL_FORWARD,
    BIASED_FORWARD,
    BIASED_MASKED_FORWARD,
    CAPPED_CAUSAL_FORWARD,
    CAPPED_FORWARD,
    CAPPED_MASKED_FORWARD,
    CAPPED_WINDOW_FORWARD,
    CAUSAL_FORWARD,
    FORWARD,
    MASKED_CAUSAL_FORWARD,
    MASKED_FORWARD,
    MASKED_WINDOW_FORWARD,
    WINDOW_FORWARD,
    Added,
    added_mask,
    attention_grads,
    attentions,
    backward_of,
    cap_of_scores,
    dropped_share,
    features_scattered,
    library_layouts,
    mask_beside_bias,
    query_of,
    variants,
    with_sinks,
)
from autotuner.kernels.rules.elementwise import dropout_masks

_IMPLEMENTATION = "autotuner.kernels.triton.attention"

STORAGE = "bit"
LEVELS = 1 << 16
"""Of the share that is kept."""
WORD_BITS = 32
FEATURES = (16, 32, 64, 128)
WIDE_FEATURES = (256,)
"""Of heads whose tiles are smaller: their programs are kernels of their own, so that each has the tiles that pay."""
WIDE = "triton_wide_attention"
TILES = (16, 32, 64, 128, 256)
MOST_OFFSET = (1 << 31) - 1
"""Elements from the first of a batch entry to another along one axis: programs count those in 32 bits."""
MOST_WORDS = (1 << 31) - (1 << 16)
"""Words are numbered in 32 bits, and a tile of them may begin at the last."""
MOST_HEADS = (1 << 16) - 1
"""Of a batch, along one axis of a grid."""
MOST_ADDED = (1 << 31) - 1
"""Elements of what is added to the scores."""
WORD_TILES = (64, 128)
"""Keys of a tile whose bits are read."""

FORWARD_PARAMS = ("rows", "columns", "warps", "stages")
BACKWARD_PARAMS = (
    "query_rows", "query_columns", "query_warps", "key_rows", "key_columns", "key_warps", "stages",
)  # fmt: skip
WARP_ROWS, WIDE_WARP_ROWS = 16, 8
"""Rows of scores that a warp computes, or a multiple; in the program of keys and values they are columns. Of wide
heads, two warps share 16 rows: the sums of a row fill registers."""
SHARED_BYTES = 227 << 10
"""Of shared memory, the most that a program has on any device (CUDA's guide, capabilities 9.0 and 10.0)."""


def kept_levels(p: float) -> int:
    """Return how many 65536ths of the weights are kept where p is dropped.

    >>> kept_levels(0.1)
    58982
    """
    return round((1 - p) * LEVELS)


def dropped_by_bits(p: float) -> float:
    """Return the share that is dropped where p is asked for, to 1/131072."""
    return 1 - kept_levels(p) / LEVELS


def params_of(candidate: Candidate) -> dict[str, int]:
    """Return the launch parameters of a candidate."""
    return {name: int(value) for name, value in candidate.params}


def unfit(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why the programs do not compute this, or None if they do."""
    query = query_of(subgraph)
    if query.dtype not in HALVES:
        return f"it computes in {' or '.join(HALVES)}; the query is {query.dtype}"
    widths = WIDE_FEATURES if candidate.kernel.startswith(WIDE) else FEATURES
    if query.extents[-1] not in widths:
        return f"it takes heads of {', '.join(map(str, widths))} features; these have {query.extents[-1]}"
    extents, axes = letter_extents(subgraph, subgraph.nodes[0]), score_axes(subgraph)
    heads = prod(extents[letter] for letter in axes.batch + axes.heads)
    if heads > MOST_HEADS:
        return f"it launches at most {MOST_HEADS:,} heads over a whole batch; these are {heads:,}"
    if "pointwise" in subgraph.kinds and cap_of_scores(subgraph) is None:
        return "it computes no expression of the scores but a soft cap, c tanh(x / c)"
    factor = next((float(dict(node.attributes)["factor"]) for node in subgraph.nodes if node.kind == "scale"), 1.0)
    if factor <= 0:
        return f"it takes a positive factor of the scores; this one is {factor:g}"
    return (
        _not_by_words(subgraph, candidate)
        or _not_added(subgraph, candidate)
        or _not_as_sinks(subgraph, candidate)
        or _not_these_tiles(subgraph, candidate)
        or features_scattered(subgraph, candidate)
        or _too_far_apart(subgraph, candidate)
    )


def _too_far_apart(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say which operand reaches further within a batch entry than 32 bits count, or None if none does.

    Verification would find wrong values, on a device that has such tensors; a read far outside may end the process.
    """
    masks, forms = dropout_masks(subgraph), forms_by_number(subgraph, candidate)
    added = {added_mask(subgraph)[0], mask_beside_bias(subgraph)[0]}
    batches = _batch_axes(subgraph)
    for number, form in forms.items():
        tensor = subgraph.tensors[number]
        if number in masks or number in added or form.is_flat or len(tensor.axes) < len("bhrf"):
            continue
        strides, _, _ = form.placed(tensor.axes, tensor.extents)
        reach = [
            (extent - 1) * stride
            for axis, (extent, stride) in enumerate(zip(tensor.extents, strides, strict=True))
            if axis not in batches.get(number, ())
        ]
        if max(reach) > MOST_OFFSET:
            return (
                f"it counts at most {MOST_OFFSET:,} elements within a batch entry; tensor {number} reaches over "
                f"{max(reach):,} in {form}"
            )
    return None


def _batch_axes(subgraph: Subgraph) -> dict[int, list[int]]:
    """Return where query, key, value, output and, in backward, gradients have their batch: it is counted in 64 bits."""
    return {number: [*map(each.declared.index, each.batch)] for number, each in head_operands(subgraph).items()}


def _not_by_words(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why the mask of dropped weights is not read and written word by word; None if it is, or there is none."""
    masks = dropout_masks(subgraph)
    if not masks:
        return None
    forms = forms_by_number(subgraph, candidate)
    for number in masks:
        mask = subgraph.tensors[number]
        form = forms.get(number)
        if form is not None and (form.storage != STORAGE or form.layout.axes != mask.axes):
            return f"its mask is of bits, in declared order; {form} is not"
        if mask.extents[-1] % WORD_BITS:
            return f"it draws masks by words of {WORD_BITS} keys; a row of this one has {mask.extents[-1]}"
        if prod(mask.extents) // WORD_BITS > MOST_WORDS:
            return f"it counts at most {MOST_WORDS:,} words of {WORD_BITS} weights; there are {prod(mask.extents):,}"
    p = dropped_share(subgraph)
    if not 0 < kept_levels(p) < LEVELS:
        return f"it keeps whole {LEVELS}ths of the weights: none or all of them where p is {p:g}"
    return None


def _not_added(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why it does not add this mask or bias to the scores, or these two; None if it does, or there is none."""
    reasons = (_not_one_added(subgraph, candidate, each) for each in (added_mask(subgraph), mask_beside_bias(subgraph)))
    return next(filter(None, reasons), None)


def _not_one_added(subgraph: Subgraph, candidate: Candidate, added: Added) -> str | None:
    number, places = added
    if number is None:
        return None
    batches = len(score_axes(subgraph).batch)
    batch, (*heads, rows, keys) = places[:batches], places[batches:]
    if batches == 2 and batch[0] is not None:
        return "it adds what all that lies along the first of two axes of a batch have in common"
    if "bias_grad" in subgraph.kinds and added == added_mask(subgraph) and batches == 2 and batch[1] is not None:
        return "it makes the gradient of a bias that the whole of a batch of two axes shares"
    if keys is None:
        return "it adds what has an axis of keys"
    if len({place is None for place in heads}) > 1:
        return "it adds what each head has of its own, or all heads together"
    tensor, form = subgraph.tensors[number], forms_by_number(subgraph, candidate)[number]
    if prod(tensor.extents) > MOST_ADDED:
        return f"it adds at most {MOST_ADDED:,} elements to the scores; these are {prod(tensor.extents):,}"
    strides, _, _ = form.placed(tensor.axes, tensor.extents)
    if strides[keys] > 1 and tensor.extents[keys] > 1:
        return f"it adds what has its keys side by side: tensor {number} lies as {form}"
    own = [(strides[place], tensor.extents[place]) for place in heads if place is not None]
    if len(own) > 1 and own[0][0] != own[1][0] * own[1][1]:
        return f"heads of tensor {number} do not act as one axis in {form}"
    if "bias_grad" in subgraph.kinds and added == added_mask(subgraph) and rows is None:
        return "it makes the gradient of a bias over rows and keys; this one has no axis of rows"
    return None


def _not_as_sinks(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say which of sinks and their gradient does not lie dense, as it is declared; None if none does so."""
    forms = forms_by_number(subgraph, candidate)
    read = (node.inputs[1] for node in subgraph.nodes if node.kind == "sink_softmax")
    made = (node.outputs[0] for node in subgraph.nodes if node.kind == "sink_grad")
    for number in (*read, *made):
        if str(forms[number]) != subgraph.tensors[number].axes:
            return f"it reads sinks as they are declared; tensor {number} lies as {forms[number]}"
    return None


def _not_these_tiles(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why a program cannot run with a candidate's launch parameters, or None if it can."""
    wanted = BACKWARD_PARAMS if backward_of(subgraph) else FORWARD_PARAMS
    params = params_of(candidate)
    if set(params) != set(wanted):
        return f"it takes the parameters {', '.join(wanted)}; given: {', '.join(params) or 'none'}"
    for name, value in params.items():
        if name == "stages":
            continue
        if log2(value) % 1 if value > 0 else True:
            return f"{name} is a power of 2; given: {value}"
        tiles = WORD_TILES if name.endswith("columns") and dropout_masks(subgraph) else TILES
        if not name.endswith("warps") and value not in tiles:
            return f"{name} is one of {', '.join(map(str, tiles))}; given: {value}"
    least = WIDE_WARP_ROWS if candidate.kernel.startswith(WIDE) else WARP_ROWS
    for name, warps in (("rows", "warps"), ("query_rows", "query_warps"), ("key_columns", "key_warps")):
        if name in params and params[name] < least * params[warps]:
            return f"a warp computes {least} of the {name} or more; {params[warps]} share {params[name]}"
    return _not_in_shared_memory(query_of(subgraph), params)


def _not_in_shared_memory(query: TensorType, params: dict[str, int]) -> str | None:
    """Say which of a program's tiles do not fit into shared memory together, or None if all do: those that stay, and
    those that `stages` steps read, each of two operands but for a forward's queries."""
    row = query.extents[-1] * ELEMENT_BYTES[query.dtype]
    held = {
        "rows": (1, "columns"), "query_rows": (2, "query_columns"), "key_columns": (2, "key_rows"),
    }  # fmt: skip
    for stay, (operands, read) in held.items():
        if stay not in params:
            continue
        taken = row * (operands * params[stay] + 2 * params["stages"] * params[read])
        if taken > SHARED_BYTES:
            tiles = f"{params[stay]} {stay} and {params['stages']} stages of {params[read]} {read}"
            return f"{tiles} take {taken:,} bytes of shared memory; a program has {SHARED_BYTES:,} at most"
    return None


_WITH_SINKS = with_sinks(
    FORWARD, CAUSAL_FORWARD, MASKED_FORWARD, BIASED_FORWARD, MASKED_CAUSAL_FORWARD, WINDOW_FORWARD,
    MASKED_WINDOW_FORWARD,
)  # fmt: skip
_KINDS = variants(
    FORWARD, CAUSAL_FORWARD, MASKED_FORWARD, BIASED_FORWARD, MASKED_CAUSAL_FORWARD, BIASED_CAUSAL_FORWARD,
    CAPPED_FORWARD, CAPPED_CAUSAL_FORWARD, CAPPED_MASKED_FORWARD, BIASED_MASKED_FORWARD, WINDOW_FORWARD,
    MASKED_WINDOW_FORWARD, CAPPED_WINDOW_FORWARD, *_WITH_SINKS,
)  # fmt: skip
_forward = partial(
    Kernel, covers=(), runs=f"{_IMPLEMENTATION}:forward", refuses=unfit, compiles=True, numerics="unbiased",
    layouts=library_layouts(STORAGE), anchors=True, merges=False, pitched=True, flat=(STORAGE,), drops=dropped_by_bits,
    patterns=attentions(_KINDS),
)  # fmt: skip
_backward = partial(
    _forward, runs=f"{_IMPLEMENTATION}:backward", numerics="exact", patterns=attention_grads(_KINDS),
    consistent="autotuner.kernels.torch.attention_masks:fill_in_bits",
)  # fmt: skip
KERNELS.add(
    _forward("triton_attention", partner="triton_attention_grad"),
    _backward("triton_attention_grad", partner="triton_attention"),
    _forward("triton_wide_attention", partner="triton_wide_attention_grad"),
    _backward("triton_wide_attention_grad", partner="triton_wide_attention"),
)
