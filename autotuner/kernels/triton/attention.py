"""Attention by this project's own Triton programs, forward and backward: every operand where it lies.

The mask of dropped weights is drawn from a seed of torch's generator, and left for backward as bits.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from autotuner.errors import KernelError
from autotuner.ir.device import NVIDIA, vendor_of
from autotuner.ir.records import Call
from autotuner.kernels.rules.attention import cap_of_scores, dropped_share
from autotuner.kernels.rules.attention_triton import WORD_BITS, kept_levels, params_of
from autotuner.kernels.torch.attention import (
    added,
    backward_operands,
    backward_outputs,
    band,
    bias_gradient,
    causal,
    factor,
    forward_operands,
    forward_output,
    masked,
    sink_gradient,
    sinks,
)

Run = Callable[[], Any]

SEEDS = 1 << 62
PROGRAMS = 512
"""That fill a device: a bias that is shared by so many batch entries that fewer would make its gradient has that made
in parts."""


SINK_ROWS = 1024
"""Rows that a program reads at once, for the gradient of a sink."""


class TritonLaunch:
    """A Triton program with its grid and its arguments, compiled when it is made."""

    def __init__(
        self, program: Any, grid: tuple[int, ...], arguments: Sequence[Any], constants: dict[str, Any]
    ) -> None:
        self._launch, self._arguments, self._constants = program[grid], tuple(arguments), constants
        self._device = torch.cuda.device_of(self._arguments[0])  # type: ignore[no-untyped-call]
        try:
            with self._device:
                program.warmup(*self._arguments, grid=grid, **constants)
        except Exception as error:  # Triton's compiler raises what it likes
            raise KernelError(f"Triton does not compile {program.__name__}: {error}") from None

    def __call__(self) -> None:
        with self._device:
            self._launch(*self._arguments, **self._constants)


def forward(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """softmax(factor * query key^T + mask), dropped or not, times value; the log-sum-exp, and the mask's bits."""
    program = _programs()[0]
    subgraph, params = call.subgraph, params_of(call.candidate)
    query, key, value = forward_operands(subgraph, inputs)
    out = forward_output(subgraph, outputs[0])
    batch, heads, rows, features = query.shape
    p = dropped_share(subgraph)
    seed = torch.empty(1, dtype=torch.int64, device=query.device)
    saves = len(outputs) > 1
    words = outputs[2].view(torch.int32) if len(outputs) > 2 else seed
    if p and len(outputs) < 3:  # nothing else reads the mask
        words = torch.empty(query[..., 0].numel() * key.shape[2] // WORD_BITS, dtype=torch.int32, device=query.device)
    addend, mask = added(subgraph, inputs, query, key), masked(subgraph, inputs, query, key)
    cap, beside = cap_of_scores(subgraph), sinks(subgraph, inputs)
    window = band(subgraph)
    launch = TritonLaunch(
        program,
        (-(-rows // params["rows"]), batch * heads),
        (
            query, key, value, out, outputs[1] if saves else seed, words, seed if addend is None else addend,
            seed if mask is None else mask, seed if beside is None else beside, seed,
            *_strides(query, key, value, out), *_steps(addend), *_steps(mask), heads, rows, key.shape[2],
            factor(subgraph), cap or 1.0, *(window or (0, 0)), 1 / (1 - p),
        ),
        {
            "FEATURES": features, "ROWS": params["rows"], "COLUMNS": params["columns"],
            "EVEN": rows % params["rows"] == key.shape[2] % params["columns"] == 0, "CAUSAL": causal(subgraph),
            "WINDOW": window is not None, "GROUP": heads // key.shape[1], "CAPS": cap is not None,
            "ADDS": addend is not None, "OVER_ROWS": _over_rows(addend), "HIDES": mask is not None,
            "HIDES_ROWS": _over_rows(mask), "SINKS": beside is not None, "SAVES": saves, "DROPS": p > 0,
            "KEPT": kept_levels(p), "PACKS": vendor_of(query.device.type, torch.version.hip) == NVIDIA,
            "num_warps": params["warps"], "num_stages": params["stages"],
        },
    )  # fmt: skip

    def run() -> None:
        if p:
            seed.random_(0, SEEDS)
        launch()

    return run


def backward(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """Gradients of query, key and value, of a bias and of sinks; the boundary is that of `attention_flash.backward`,
    the mask as bits, what is added to the scores, and sinks."""
    _, of_queries, of_keys, of_bias, of_sinks = _programs()
    subgraph, params = call.subgraph, params_of(call.candidate)
    gradient, query, key, value, out = backward_operands(subgraph, inputs)
    into = backward_outputs(subgraph, outputs)
    batch, heads, rows, features = query.shape
    shared_heads, columns = key.shape[1:3]
    p = dropped_share(subgraph)
    statistics = torch.empty(batch * heads * rows * 2, dtype=torch.float32, device=query.device)
    words = inputs[6].view(torch.int32) if p else statistics
    addend, into_bias = added(subgraph, inputs, query, key), bias_gradient(subgraph, outputs, query, key)
    cap = cap_of_scores(subgraph)
    beside, window = masked(subgraph, inputs, query, key), band(subgraph)
    extents, scores = (heads, rows, columns), (factor(subgraph), cap or 1.0)
    last = (*_steps(addend), *_steps(beside), *extents, *scores, *(window or (0, 0)), 1 - p)
    mask = (words, statistics if addend is None else addend, statistics if beside is None else beside)
    flags = {"FEATURES": features, "GROUP": heads // shared_heads, "DROPS": p > 0}
    flags |= {"HIDES": beside is not None, "HIDES_ROWS": _over_rows(beside)}
    adds = {"ADDS": addend is not None, "OVER_ROWS": _over_rows(addend)}
    adds |= {"CAUSAL": causal(subgraph), "WINDOW": window is not None, "CAPS": cap is not None}
    tiles = {side: {"ROWS": params[f"{side}_rows"], "COLUMNS": params[f"{side}_columns"]} for side in ("query", "key")}
    options = {
        side: flags | tile | {
            "EVEN": rows % tile["ROWS"] == columns % tile["COLUMNS"] == 0,
            "num_warps": params[f"{side}_warps"], "num_stages": params["stages"],
        }
        for side, tile in tiles.items()
    }  # fmt: skip
    row_tiles, column_tiles = -(-rows // tiles["query"]["ROWS"]), -(-columns // tiles["key"]["COLUMNS"])
    launches: list[Run] = [
        TritonLaunch(
            of_queries,
            (row_tiles, batch * heads),
            (
                query, key, value, out, gradient, into[0], inputs[5], statistics, *mask,
                *_strides(query, key, value, out, gradient, into[0]), *last,
            ),
            options["query"] | adds,
        ),
        TritonLaunch(
            of_keys,
            (column_tiles, batch * shared_heads),
            (
                query, key, value, gradient, into[1], into[2], statistics, *mask,
                *_strides(query, key, value, gradient, into[1], into[2]), *last,
            ),
            options["key"] | adds,
        ),
    ]  # fmt: skip
    if into_bias is not None:
        alike = {"BATCHES": batch if _shared(into_bias, 0) else 1, "HEADS": heads if _shared(into_bias, 1) else 1}
        own = into_bias[: batch // alike["BATCHES"], : heads // alike["HEADS"]]
        whole_tiles, sharing = row_tiles * -(-columns // tiles["query"]["COLUMNS"]), prod(alike.values())
        parts = parts_of_sum(whole_tiles * batch * heads // sharing, sharing)
        made = own[None] if parts == 1 else torch.empty(parts, *own.shape, dtype=torch.float32, device=own.device)
        launches.append(
            TritonLaunch(
                of_bias,
                (whole_tiles, batch * heads // sharing, parts),
                (
                    query, key, value, gradient, made, statistics, *mask,
                    *_strides(query, key, value, gradient), *made.stride(), *last,
                ),
                options["query"] | alike | {"PARTS": parts, "CAUSAL": causal(subgraph)},
            )
        )  # fmt: skip
        if parts > 1:
            total = torch.empty_like(made[0])
            launches += [partial(torch.sum, made, 0, out=total), partial(own.copy_, total)]

    into_sinks = sink_gradient(subgraph, outputs)
    if into_sinks is not None:
        constants = {"COLUMNS": SINK_ROWS, "num_warps": 4}
        given = (statistics, sinks(subgraph, inputs), into_sinks, batch, heads, rows, 1 - p)
        launches.append(TritonLaunch(of_sinks, (heads,), given, constants))

    def run() -> None:
        for launch in launches:
            launch()

    return run


def parts_of_sum(programs: int, terms: int) -> int:
    """Return in how many parts sums of so many terms are made, each by so many programs without parts.

    >>> parts_of_sum(4, 4096), parts_of_sum(1024, 8), parts_of_sum(16, 3)
    (128, 1, 3)
    """
    return max(1, min(terms, PROGRAMS // programs))


def _programs() -> tuple[Any, Any, Any, Any, Any]:
    """Import the programs: of forward, and of queries, of keys and values, of a bias and of sinks in backward.

    Raises:
        KernelError: Triton is not installed.
    """
    try:
        from autotuner.kernels.triton import attention_backward, attention_forward
    except ImportError as error:
        raise KernelError(f"attention's own programs need triton, which cannot be imported: {error}") from None
    backward = attention_backward
    return (
        attention_forward.forward,
        backward.query_gradient,
        backward.key_value_gradient,
        backward.bias_gradient,
        backward.sink_gradient,
    )


def _strides(*operands: Tensor) -> list[int]:
    """Return the strides along batch, heads and rows of operands whose features are contiguous."""
    return [stride for operand in operands for stride in operand.stride()[:3]]


def _steps(addend: Tensor | None) -> tuple[int, ...]:
    """Return the strides of what is added to the scores, along these, and how many entries of the batch it has."""
    return (0, 0, 0, 0, 1) if addend is None else (*addend.stride(), len(addend))


def _over_rows(addend: Tensor | None) -> bool:
    """Tell whether what is added to the scores differs from row to row, or from head to head."""
    return addend is not None and not (_shared(addend, 1) and _shared(addend, 2))


def _shared(view: Tensor, axis: int) -> bool:
    """Tell whether all that lies along an axis is one."""
    return view.stride(axis) == 0
