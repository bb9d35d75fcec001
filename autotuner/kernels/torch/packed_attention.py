"""Attention over packed tokens by torch's operators: each row sees the keys between two bounds of its own.

For every device, and as the reference of the Triton programs. Rows are taken a few at a time, with the keys that they
see, so no matrix of all rows and keys is made.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_AT_ONCE = 128


@dataclass(frozen=True)
class _Rows:
    """Some rows with the keys that they see.

    Args:
        rows, keys: slices.
        seen: (rows, keys), which of them a row sees.
        scale: (heads, rows, keys), what weights are multiplied with: 0 where they are dropped; None without dropout.
    """

    rows: slice
    keys: slice
    seen: Tensor
    scale: Tensor | None


def forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, seed: Tensor, factor: float, p: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Return the output, (heads, rows, features), and the log-sum-exp in base e, (heads, rows).

    Args:
        query: (heads, rows, features).
        key: with value, (shared heads, rows, features).
        bounds: (rows, 2), the first key of a row and the one behind its last.
        seed: of the mask of dropped weights, one int64.
        factor: of the scores.
        p: the share of the weights that is dropped.
        cap: of the scores, as cap * tanh(scores / cap); 0 for none.
    """
    key, value = _for_all(key, query), _for_all(value, query)
    out = query.new_zeros(query.shape)
    log_sum_exp = query.new_zeros(query.shape[:2], dtype=torch.float32)
    for part in _parts(query, bounds, seed, p):
        weights, sums, _ = _weights(query, key, part, factor, cap)
        log_sum_exp[:, part.rows] = sums
        if part.scale is not None:
            weights = weights * part.scale
        out[:, part.rows] = (weights @ _wide(value[:, part.keys])).to(out.dtype)
    return out, log_sum_exp


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, seed: Tensor,
    factor: float, p: float, cap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value, given that of the output."""
    shared, count = key.shape[0], query.shape[0]
    wide_key, wide_value = _for_all(key, query), _for_all(value, query)
    into = [torch.zeros_like(_wide(each)) for each in (query, wide_key, wide_value)]
    for part in _parts(query, bounds, seed, p):
        weights, _, share = _weights(query, wide_key, part, factor, cap)
        dropped = weights if part.scale is None else weights * part.scale
        gradients = _wide(gradient[:, part.rows])
        into[2][:, part.keys] += dropped.transpose(1, 2) @ gradients
        of_weights = gradients @ _wide(wide_value[:, part.keys]).transpose(1, 2)
        if part.scale is not None:
            of_weights = of_weights * part.scale
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
        if share is not None:
            of_scores = of_scores * (1 - share.square())
        into[0][:, part.rows] += factor * (of_scores @ _wide(wide_key[:, part.keys]))
        into[1][:, part.keys] += factor * (of_scores.transpose(1, 2) @ _wide(query[:, part.rows]))
    for number in (1, 2):
        into[number] = into[number].view(shared, count // shared, *key.shape[1:]).sum(1)
    return tuple(each.to(query.dtype) for each in into)  # type: ignore[return-value]


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 or more."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _for_all(shared: Tensor, query: Tensor) -> Tensor:
    """Return keys or values of heads that share them, once for each head."""
    return shared.repeat_interleave(query.shape[0] // shared.shape[0], 0)


def _parts(query: Tensor, bounds: Tensor, seed: Tensor, p: float) -> Iterator[_Rows]:
    """Go over some rows at a time."""
    heads, count = query.shape[:2]
    limits = bounds.tolist()
    for first in range(0, count, ROWS_AT_ONCE):
        rows = slice(first, min(first + ROWS_AT_ONCE, count))
        keys = slice(min(low for low, _ in limits[rows]), max(high for _, high in limits[rows]))
        places = torch.arange(keys.start, keys.stop, device=query.device)
        seen = (places >= bounds[rows, :1]) & (places < bounds[rows, 1:])
        scale = None
        if p:
            generator = torch.Generator(query.device).manual_seed(int(seed) + first)
            drawn = torch.rand(heads, *seen.shape, device=query.device, generator=generator)
            scale = (drawn >= p).to(_wide(query[:0]).dtype) / (1 - p)
        yield _Rows(rows, keys, seen, scale)


def _weights(
    query: Tensor, key: Tensor, part: _Rows, factor: float, cap: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return weights before dropout, the log-sum-exp of the scores, and the scores' share of their cap."""
    scores = factor * (_wide(query[:, part.rows]) @ _wide(key[:, part.keys]).transpose(1, 2))
    share = torch.tanh(scores / cap) if cap else None
    if share is not None:
        scores = share * cap
    scores = scores.masked_fill(~part.seen, float("-inf"))
    sums = scores.logsumexp(-1)
    return torch.exp(scores - sums[..., None]), sums, share
