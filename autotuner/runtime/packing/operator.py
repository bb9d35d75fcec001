"""Attention over packed tokens as an operator of torch, with its gradient: by Triton on devices that have it."""

from typing import Any

import torch
from torch import Tensor

from autotuner.errors import InputError
from autotuner.kernels.torch import packed_attention as by_torch
from autotuner.runtime.devices import device_runtime
from autotuner.runtime.packing.bounds import seers_of

SEEDS = 1 << 62
PLACES_MAX = 1 << 31
"""Programs count elements of a head in 32 bits."""


@torch.library.custom_op("autotuner::packed_attention", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, seed: Tensor, factor: float, p: float, cap: float,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if device_runtime(query.device).has_triton:
        from autotuner.kernels.triton import packed_attention as by_triton

        return by_triton.forward(query, key, value, bounds, seed, factor, p, cap, bias)
    out, log_sum_exp = by_torch.forward(query, key, value, bounds, seed, factor, p, cap, bias)
    return _rows_outermost(out), log_sum_exp


PACKED_ATTENTION = torch.ops.autotuner.packed_attention.default


@_forward.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _made(query), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op("autotuner::packed_attention_backward", mutates_args=())
def _gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum_exp: Tensor, bounds: Tensor,
    seed: Tensor, bias: Tensor | None, *, factor: float, p: float, cap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if device_runtime(query.device).has_triton:
        from autotuner.kernels.triton import packed_attention as by_triton

        seers = seers_of(bounds)
        return by_triton.backward(
            gradient, query, key, value, out, log_sum_exp, bounds=bounds, seers=seers, seed=seed, factor=factor, p=p,
            cap=cap, bias=bias,
        )  # fmt: skip
    found = by_torch.backward(gradient, query, key, value, bounds, seed, factor=factor, p=p, cap=cap, bias=bias)
    into_query, into_key, into_value = map(_rows_outermost, found)
    return into_query, into_key, into_value


@_gradients.register_fake
def _(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _made(query), _made(key), _made(value)


@torch.library.custom_op("autotuner::packed_attention_backward_bias", mutates_args=())
def _bias_gradient(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum_exp: Tensor, bounds: Tensor,
    seed: Tensor, bias: Tensor, *, factor: float, p: float, cap: float,
) -> Tensor:  # fmt: skip
    if device_runtime(query.device).has_triton:
        from autotuner.kernels.triton import packed_attention as by_triton

        return by_triton.bias_gradient(
            gradient, query, key, value, out, log_sum_exp, bounds=bounds, seed=seed, factor=factor, p=p, cap=cap,
            bias=bias,
        )  # fmt: skip
    numbers: dict[str, float] = {"factor": factor, "p": p, "cap": cap}
    return by_torch.bias_gradient(gradient, query, key, value, out, bounds, seed, **numbers, bias=bias)


@_bias_gradient.register_fake
def _(*given: Tensor, **_: Any) -> Tensor:
    bias = given[8]
    return bias.new_empty(bias.shape)


def _made(like: Tensor) -> Tensor:
    """Return an uninitialised tensor (heads, rows, features) whose rows are outermost in memory."""
    heads, rows, features = like.shape
    return like.new_empty(rows, heads, features).transpose(0, 1)


def _rows_outermost(tensor: Tensor) -> Tensor:
    return _made(tensor).copy_(tensor)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, bounds, seed, *numbers, bias = inputs
    ctx.numbers = dict(zip(("factor", "p", "cap"), numbers, strict=True))
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, *output, bounds, seed, bias)


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # which checkpoints hand out once
    found = _gradients(gradient, *saved, **ctx.numbers)
    into_bias = _bias_gradient(gradient, *saved, **ctx.numbers) if ctx.needs_input_grad[8] else None
    return (*found, *[None] * 5, into_bias)


_forward.register_autograd(_backward, setup_context=_setup)


def _check(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, p: float, bias: Tensor | None) -> None:
    if query.dim() != 3 or key.shape != value.shape or key.shape[1:] != query.shape[1:]:
        shapes = ", ".join(str(list(each.shape)) for each in (query, key, value))
        raise InputError(
            f"query, key and value are (heads, rows, features), the latter two of equal shape; given: {shapes}"
        )
    if query.shape[0] % key.shape[0]:
        raise InputError(f"{query.shape[0]} heads of queries cannot share {key.shape[0]} of keys: give a divisor")
    if bounds.shape != (query.shape[1], 2) or bounds.dtype != torch.int32:
        raise InputError(
            f"bounds are ({query.shape[1]}, 2) of int32, as packed_bounds makes them; given: {list(bounds.shape)} of "
            f"{bounds.dtype}"
        )
    if not 0.0 <= p < 1.0:
        raise InputError(f"p is from 0 up to 1; given: {p}")
    if bias is not None and (bias.dim() != 2 or bias.shape[0] != query.shape[0] or bias.shape[1] % 2 == 0):
        raise InputError(
            f"a bias is ({query.shape[0]}, distances), of distances from -reach to reach, so an odd number; given: "
            f"{list(bias.shape)}"
        )
    if bias is not None and bias.numel() >= PLACES_MAX:
        raise InputError(f"a bias of {bias.numel():,} numbers: {PLACES_MAX:,} are too many")
    if max(each.stride(1) for each in (query, key, value)) * query.shape[1] >= PLACES_MAX:
        raise InputError(f"{query.shape[1]:,} rows reach further than {PLACES_MAX:,} elements: pack fewer tokens")


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, factor: float, p: float = 0.0, cap: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of each row over the keys between its bounds.

    Args:
        query: (heads, rows, features).
        key: with value, (shared heads, rows, features): as many, or a divisor.
        bounds: (rows, 2) of int32: the first key of a row and the one behind its last. Neither may decrease from row
            to row, and a row sees one key at least; `bounds_of` makes them.
        factor: of the scores.
        p: the share of the weights that is dropped; the mask follows from torch's generator of the device.
        cap: of the scores, as cap * tanh(scores / cap); 0 for none.
        bias: (heads, 2 * reach + 1), a relative bias, added to scores behind the cap: place reach + distance has the
            number for a key so many rows behind its query. Pairs that are further apart than reach have that of the
            nearest end. Its gradient is summed in float32, or in float64 beside operands of that type.

    Returns:
        (heads, rows, features), rows outermost in memory. It can be differentiated once.

    Raises:
        InputError: shapes that do not go together, or p that is not from 0 up to 1.
    """
    _check(query, key, value, bounds, p, bias)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if p > 0.0:
        seed = torch.randint(0, SEEDS, (1,), device=query.device)
    else:
        seed = torch.zeros(1, dtype=torch.int64, device=query.device)
    if bias is not None:
        bias = bias.to(torch.promote_types(query.dtype, torch.float32))
    out: Tensor = _forward(query, key, value, bounds.contiguous(), seed, factor, p, cap, bias)[0]
    return out
