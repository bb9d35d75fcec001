"""Attention over packed tokens by torch's operators: each row sees the keys between two bounds of its own.

For every device, and as the reference of the Triton programs, whose masks of dropped weights it draws. Rows are taken a
few at a time, with the keys that they see, so no matrix of all rows and keys is made.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.packed_attention import BITS_OF_SEED
from autotuner.ir.records import Call, Node, Subgraph
from autotuner.kernels.rules.attention_triton import LEVELS, kept_levels
from autotuner.kernels.rules.packed_attention import heads_outermost, settings_of

ROWS_AT_ONCE = 128
LN_2 = log(2)
WORD_BITS = 32
_LOW = 0xFFFFFFFF
_KEY_OF_HEAD = 0x1E3779B97F4A7C15
_KEYS, _FACTORS = (0x9E3779B9, 0xBB67AE85), (0xD2511F53, 0xCD9E8D57)
"""Of Philox4x32."""
_ROUNDS = 7


@dataclass(frozen=True)
class _Rows:
    """Some rows with the keys that they see.

    Args:
        rows, keys: slices.
        seen: (rows, keys), which of them a row sees.
        scale: (heads, rows, keys), what weights are multiplied with: 0 where they are dropped; None without dropout.
        places: (rows, keys), where in a relative bias the number of a pair is; None without one.
    """

    rows: slice
    keys: slice
    seen: Tensor
    scale: Tensor | None
    places: Tensor | None


def forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, seed: Tensor, factor: float, p: float, cap: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output, (heads, rows, features), and the log-sum-exp in base 2, (heads, rows).

    Args:
        query: (heads, rows, features).
        key: with value, (shared heads, rows, features).
        bounds: (rows, 2 or more), the first key of a row and the one behind its last.
        seed: of the mask of dropped weights, one int64.
        factor: of the scores.
        p: the share of the weights that is dropped, in whole 65536ths.
        cap: of the scores, as cap * tanh(scores / cap); 0 for none.
        bias: (heads, distances), what is added to scores, capped or not, by the distance from a row to its key: from
            -reach to reach, and those that are further have that of the nearest end.
    """
    key, value = _for_all(key, query), _for_all(value, query)
    out = query.new_zeros(query.shape)
    log_sum_exp = query.new_zeros(query.shape[:2], dtype=_wide(query[:0]).dtype)
    for part in _parts(query, bounds, seed, p, bias):
        weights, sums, _ = _weights(query, key, part, factor, cap, bias)
        log_sum_exp[:, part.rows] = sums / LN_2
        if part.scale is not None:
            weights = weights * part.scale
        out[:, part.rows] = (weights @ _wide(value[:, part.keys])).to(out.dtype)
    return out, log_sum_exp


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, seed: Tensor, *,
    factor: float, p: float, cap: float, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value, given that of the output."""
    shared, count = key.shape[0], query.shape[0]
    wide_key, wide_value = _for_all(key, query), _for_all(value, query)
    into = [torch.zeros_like(_wide(each)) for each in (query, wide_key, wide_value)]
    for part in _parts(query, bounds, seed, p, bias):
        weights, _, share = _weights(query, wide_key, part, factor, cap, bias)
        dropped = weights if part.scale is None else weights * part.scale
        into[2][:, part.keys] += dropped.transpose(1, 2) @ _wide(gradient[:, part.rows])
        of_weights = _weight_gradients(gradient, wide_value, part)
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
        if share is not None:
            of_scores = of_scores * (1 - share.square())
        into[0][:, part.rows] += factor * (of_scores @ _wide(wide_key[:, part.keys]))
        into[1][:, part.keys] += factor * (of_scores.transpose(1, 2) @ _wide(query[:, part.rows]))
    for number in (1, 2):
        into[number] = into[number].view(shared, count // shared, *key.shape[1:]).sum(1)
    return tuple(each.to(query.dtype) for each in into)  # type: ignore[return-value]


def bias_gradient(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, bounds: Tensor, seed: Tensor, *,
    factor: float, p: float, cap: float, bias: Tensor,
) -> Tensor:  # fmt: skip
    """Return the gradient of a relative bias: of each distance, the sum over all pairs that have it.

    A row's mean gradient of its weights follows from the output as it is, rounded or not: so it does in the programs.
    """
    key, value = _for_all(key, query), _for_all(value, query)
    into = torch.zeros_like(bias, dtype=_wide(query[:0]).dtype)
    for part in _parts(query, bounds, seed, p, bias):
        weights, _, _ = _weights(query, key, part, factor, cap, bias)
        assert part.places is not None
        mean = (_wide(gradient[:, part.rows]) * _wide(out[:, part.rows])).sum(-1, keepdim=True)
        of_scores = weights * (_weight_gradients(gradient, value, part) - mean)
        into.index_add_(1, part.places.flatten(), of_scores.flatten(1))
    return into.to(bias.dtype)


def _weight_gradients(gradient: Tensor, value: Tensor, part: _Rows) -> Tensor:
    """Return the gradient of weights before dropout."""
    of_weights = _wide(gradient[:, part.rows]) @ _wide(value[:, part.keys]).transpose(1, 2)
    return of_weights if part.scale is None else of_weights * part.scale


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 or more."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _for_all(shared: Tensor, query: Tensor) -> Tensor:
    """Return keys or values of heads that share them, once for each head."""
    return shared.repeat_interleave(query.shape[0] // shared.shape[0], 0)


def _parts(query: Tensor, bounds: Tensor, seed: Tensor, p: float, bias: Tensor | None) -> Iterator[_Rows]:
    """Go over some rows at a time."""
    heads, count = query.shape[:2]
    limits = bounds[:, :2].long().tolist()
    for first in range(0, count, ROWS_AT_ONCE):
        rows = slice(first, min(first + ROWS_AT_ONCE, count))
        keys = slice(min(low for low, _ in limits[rows]), max(high for _, high in limits[rows]))
        places = torch.arange(keys.start, keys.stop, device=query.device)
        seen = (places >= bounds[rows, :1]) & (places < bounds[rows, 1:2])
        scale = None
        if kept_levels(p) < LEVELS:
            kept = kept_weights(seed, heads, rows, keys, count, kept_levels(p))
            scale = kept.to(_wide(query[:0]).dtype) / (1 - p)
        distances = None
        if bias is not None:
            reach = bias.shape[1] // 2
            own = torch.arange(rows.start, rows.stop, device=query.device)
            distances = (places - own[:, None]).clamp(-reach, reach) + reach
        yield _Rows(rows, keys, seen, scale, distances)


def _weights(
    query: Tensor, key: Tensor, part: _Rows, factor: float, cap: float, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return weights before dropout, the log-sum-exp of the scores, and the scores' share of their cap."""
    scores = factor * (_wide(query[:, part.rows]) @ _wide(key[:, part.keys]).transpose(1, 2))
    share = torch.tanh(scores / cap) if cap else None
    if share is not None:
        scores = share * cap
    if bias is not None:
        scores = scores + bias[:, part.places]
    scores = scores.masked_fill(~part.seen, float("-inf"))
    sums = scores.logsumexp(-1)
    return torch.exp(scores - sums[..., None]), sums, share


def kept_weights(seed: Tensor, heads: int, rows: slice, keys: slice, count: int, levels: int) -> Tensor:
    """Return which weights are kept, (heads, rows, keys), as the Triton programs draw them.

    A word has the bits of 32 keys of a row. Binary digits of the share that is kept, from the lowest 1 upwards, join
    one random word each, a 1 by OR and a 0 by AND.

    Args:
        seed: one int64.
        count: keys of a whole row.
        levels: so many 65536ths are kept.

    Source:
        Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
    """
    device = seed.device
    head = torch.arange(heads, dtype=torch.int64, device=device)
    of_head = (seed.reshape(()) + head * _KEY_OF_HEAD)[:, None, None]  # which wraps, as it does in the programs
    row = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=device)[:, None]
    first = keys.start // WORD_BITS
    word = torch.arange(first, -(-keys.stop // WORD_BITS), dtype=torch.int64, device=device)
    place = (row * -(-count // WORD_BITS) + word)[None]
    words = torch.zeros((), dtype=torch.int64, device=device)
    for call in range(4):
        for number, fresh in enumerate(_philox(of_head, place, call) if levels % (1 << (4 * call + 4)) else ()):
            digit = 4 * call + number
            if levels % (1 << (digit + 1)):
                words = words | fresh if (levels >> digit) % 2 else words & fresh
    bits = (words[..., None] >> torch.arange(WORD_BITS, device=device)) & 1
    begin = keys.start - first * WORD_BITS
    return bits.flatten(-2)[..., begin : begin + keys.stop - keys.start].bool()


def _philox(seed: Tensor, counter: Tensor, call: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four words of 32 bits, as int64."""
    key, other_key = seed & _LOW, (seed >> 32) & _LOW
    zero = torch.zeros_like(counter)
    first, second, third, fourth = counter & _LOW, zero + call, zero, zero
    for _ in range(_ROUNDS):
        (high, low), (other_high, other_low) = _product(_FACTORS[0], first), _product(_FACTORS[1], third)
        first, second = other_high ^ second ^ key, other_low
        third, fourth = high ^ fourth ^ other_key, low
        key, other_key = (key + _KEYS[0]) & _LOW, (other_key + _KEYS[1]) & _LOW
    return first, second, third, fourth


def _product(factor: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the higher and the lower 32 bits of products of 32 bits, whose 64 have no room in a signed number."""
    low, high = words & 0xFFFF, words >> 16
    below = factor * low  # 48 bits
    above = factor * high + (below >> 16)
    return above >> 16, ((above & 0xFFFF) << 16) | (below & 0xFFFF)


# As operators ---------------------------------------------------------------------------------------------------------


def seed_of(drawn: Tensor) -> Tensor:
    """Return a seed, one int64, from as many drawn elements as it has bits, of which those are 1 that are not 0."""
    bits = (drawn != 0).to(torch.int64)
    return (bits << torch.arange(BITS_OF_SEED, device=drawn.device)).sum().reshape(1)


def of_node(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Compute a forward or a backward operator; results have their axes as its spec has them."""
    settings, turned = settings_of(node), heads_outermost(node)
    operands = [each.permute(order) for each, order in zip(tensors, turned.reads, strict=False)]
    bias = None if settings.bias is None else tensors[settings.bias].permute(turned.bias)
    bounds = tensors[settings.bounds]
    seed = bounds.new_zeros(1, dtype=torch.int64) if settings.seed is None else seed_of(tensors[settings.seed])
    factor, p, cap = settings.numbers
    made: tuple[Tensor, ...]
    gradient, query, key, value = operands[:4] if settings.is_gradient else (operands[0], *operands)
    if not settings.is_gradient:
        made = forward(query, key, value, bounds, seed, factor, p, cap, bias)
    elif node.kind == "packed_attention_grad_bias":
        assert bias is not None
        numbers: dict[str, float] = {"factor": factor, "p": p, "cap": cap}
        made = (bias_gradient(gradient, query, key, value, operands[4], bounds, seed, **numbers, bias=bias),)
    else:
        made = backward(gradient, query, key, value, bounds, seed, factor=factor, p=p, cap=cap, bias=bias)
    return tuple(each.permute(back) for each, back in zip(made, turned.back, strict=True))


def operator(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Compute one of the operators, and copy the results into the outputs."""
    (node,) = call.subgraph.nodes
    by_number = dict(zip(call.subgraph.inputs, inputs, strict=True))
    made = dict(zip(call.subgraph.outputs, outputs, strict=True))
    operands = [by_number[number] for number in node.inputs]

    def run() -> None:
        for number, result in zip(node.outputs, of_node(node, operands), strict=True):
            if number in made:
                made[number].copy_(result)

    return run


def made_up(subgraph: Subgraph, inputs: Sequence[Tensor]) -> None:
    """Make up bounds, of sequences of 4 to 512 tokens that see all of their own, and the results of a forward."""
    (node,) = subgraph.nodes
    settings, turned = settings_of(node), heads_outermost(node)
    operands = dict(zip(subgraph.inputs, inputs, strict=True))
    bounds = operands[node.inputs[settings.bounds]]
    rows = bounds.shape[0]
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(rows).log_normal_(log(200), 0.8, generator=generator).clamp_(4, 512).long()
    ends = lengths.cumsum(0).clamp_(max=rows)
    place = torch.arange(rows)
    sequence = torch.searchsorted(ends, place, right=True)
    last = ends[sequence]
    begin = torch.cat((ends.new_zeros(1), ends))[sequence]
    bounds.copy_(torch.stack((begin, last, begin, last), 1)[:, : bounds.shape[1]])
    if not settings.is_gradient:
        return
    tensors = [operands[number] for number in node.inputs]
    _, query, key, value = (each.permute(order) for each, order in zip(tensors[:4], turned.reads, strict=False))
    seed = torch.zeros(1, dtype=torch.int64) if settings.seed is None else seed_of(tensors[settings.seed])
    bias = None if settings.bias is None else tensors[settings.bias].permute(turned.bias)
    out, log_sum_exp = forward(query, key, value, bounds, seed.to(bounds.device), *settings.numbers, bias)
    tensors[4].permute(turned.reads[4]).copy_(out)
    tensors[5].permute(turned.reads[5]).copy_(log_sum_exp)
