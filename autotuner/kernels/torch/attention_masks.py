"""Masks that attention of a library draws inside, on a CUDA device.

A library draws the mask of dropped weights from a seed and an offset, by place. Only its own kernels know how, so a
mask is read off a result: with all scores equal and unit vectors as values, an element of the output is zero where its
weight was dropped.
"""

from collections.abc import Sequence
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.form import Form
from autotuner.ir.records import Subgraph, TensorType
from autotuner.kernels.rules.attention import cap_of_scores, dropped_share
from autotuner.kernels.torch.attention import added, backward_operands, band, causal, factor, masked, sinks
from autotuner.kernels.torch.formats import encoded, made_up_seed
from autotuner.kernels.torch.programmed import outside_of_band

FEATURES = 64
"""Of a head with which masks are read; what is drawn does not depend on it."""

aten = torch.ops.aten


def library_mask(library: str, state: Tensor, extents: Sequence[int], p: float) -> Tensor:
    """Return the mask that a library draws, as booleans, true where a weight is kept.

    Args:
        library: "flash", "cudnn" or "efficient".
        state: seed and, where the library has one, offset, int64, on the CUDA device that draws.
        extents: batch, heads, rows, columns.
        p: the share that is dropped.
    """
    batch, heads, rows, columns = extents
    seed, offset = (*state.tolist(), 0)[:2]
    generator = torch.cuda.default_generators[state.device.index or 0]
    before = generator.get_state()
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": state.device}
    query = torch.zeros(batch, rows, heads, FEATURES, **like).transpose(1, 2)
    key = torch.zeros(batch, columns, heads, FEATURES, **like).transpose(1, 2)
    units = torch.eye(columns, ceil(columns / FEATURES) * FEATURES, **like)
    parts = []
    try:
        for start in range(0, columns, FEATURES):
            value = units[:, start : start + FEATURES][None, :, None].repeat(batch, 1, heads, 1).transpose(1, 2)
            generator.manual_seed(seed)
            generator.set_offset(offset)
            parts.append(_output(library, query, key, value, p) != 0)
    finally:
        generator.set_state(before)
    return torch.cat(parts, -1)[..., :columns]


def from_state(stored: Tensor, form: Form, tensor: TensorType, p: float | None) -> Tensor:
    """Decode the state of a library's generator, whose storage format has its name."""
    assert p is not None
    return library_mask(form.storage, stored, tensor.extents, p)


def _output(library: str, query: Tensor, key: Tensor, value: Tensor, p: float) -> Tensor:
    match library:
        case "flash":
            found: Tensor = aten._scaled_dot_product_flash_attention(query, key, value, p, False, False)[0]
        case "efficient":
            found = aten._scaled_dot_product_efficient_attention(query, key, value, None, False, p, False)[0]
        case _:
            found = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, p, False, False)[0]
    return found


def _fill_in(library: str | None, subgraph: Subgraph, inputs: Sequence[Tensor]) -> None:
    """Make output, log-sum-exp and mask of a backward's inputs those of its query, key and value.

    Args:
        library: whose mask it is; None for any mask.
        inputs: gradient, query, key, value, output, log-sum-exp, the mask of dropped weights as booleans where weights
            are dropped, the one that is added to the scores where one is, and sinks where they have some.
    """
    _, query, key, value, out = backward_operands(subgraph, inputs)
    wide_key, wide_value = (each.float().repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    scores = (query.float() @ wide_key.transpose(-1, -2)) * factor(subgraph)
    cap = cap_of_scores(subgraph)
    if cap is not None:
        scores = cap * (scores / cap).tanh()
    for addend in (added(subgraph, inputs, query, key), masked(subgraph, inputs, query, key)):
        if addend is not None:
            scores.view(-1, *addend.shape).add_(addend)
    rows, columns = scores.shape[-2:]
    window = (columns, 0) if causal(subgraph) else band(subgraph)
    if window is not None:
        scores.add_(outside_of_band(rows, columns, window, scores))
    total = scores.logsumexp(-1)
    beside = sinks(subgraph, inputs)
    if beside is not None:
        total = torch.logaddexp(total, beside.float()[:, None])
    inputs[5].view(scores.shape[:3]).copy_(total)
    weights = scores.sub_(total[..., None]).exp_()
    share = dropped_share(subgraph)
    if share:
        kept = inputs[6].view(scores.shape)
        if library is not None:
            number = subgraph.inputs[6]
            tensor = subgraph.tensors[number]
            form = Form.parse(tensor.axes).in_format(library)
            state = encoded(kept, form, tensor, share, made_up_seed(subgraph, number))
            kept.copy_(library_mask(library, state, tuple(kept.shape), share))
        weights = weights * kept / (1 - share)
    out.copy_(weights @ wide_value)


fill_in_bits = partial(_fill_in, None)
fill_in_flash = partial(_fill_in, "flash")
fill_in_cudnn = partial(_fill_in, "cudnn")
fill_in_efficient = partial(_fill_in, "efficient")
