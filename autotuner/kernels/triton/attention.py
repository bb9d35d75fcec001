"""Attention by this project's own Triton programs, forward and backward: every operand where it lies.

The mask of dropped weights is drawn from a seed of torch's generator, and left for backward as bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autotuner.errors import KernelError
from autotuner.ir.records import Call, Subgraph
from autotuner.kernels.rules.attention import dropped_share
from autotuner.kernels.rules.attention_triton import WORD_BITS, kept_levels, params_of
from autotuner.kernels.torch.attention import added, back, causal, factor, forward_operands

Run = Callable[[], Any]

SEEDS = 1 << 62


class Program:
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
    program, _, _ = _programs()
    subgraph, params = call.subgraph, params_of(call.candidate)
    (query, key, value), returned = forward_operands(subgraph, inputs)
    out = outputs[0].permute(back(returned))
    batch, heads, rows, features = query.shape
    p = dropped_share(subgraph)
    seed = torch.empty(1, dtype=torch.int64, device=query.device)
    saves = len(outputs) > 1
    words = outputs[2].view(torch.int32) if len(outputs) > 2 else seed
    if p and len(outputs) < 3:  # nothing else reads the mask
        words = torch.empty(query[..., 0].numel() * key.shape[2] // WORD_BITS, dtype=torch.int32, device=query.device)
    addend, added_strides = _added(subgraph, inputs, query, key)
    launch = Program(
        program,
        (-(-rows // params["rows"]), batch * heads),
        (
            query, key, value, out, outputs[1] if saves else seed, words, seed if addend is None else addend, seed,
            *_strides(query, key, value, out), *added_strides, heads, rows, key.shape[2], factor(subgraph), 1 / (1 - p),
        ),
        {
            "FEATURES": features, "ROWS": params["rows"], "COLUMNS": params["columns"],
            "EVEN": rows % params["rows"] == key.shape[2] % params["columns"] == 0, "CAUSAL": causal(subgraph),
            "ADDS": addend is not None, "SAVES": saves, "DROPS": p > 0, "KEPT": kept_levels(p),
            "PACKS": query.is_cuda, "num_warps": params["warps"], "num_stages": params["stages"],
        },
    )  # fmt: skip

    def run() -> None:
        if p:
            seed.random_(0, SEEDS)
        launch()

    return run


def backward(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """Gradients of query, key and value; the boundary is that of `attention_flash.backward`, the mask as bits."""
    _, of_queries, of_keys = _programs()
    subgraph, params = call.subgraph, params_of(call.candidate)
    gradient, query, key, value, out = (tensor.permute(0, 2, 1, 3) for tensor in inputs[:5])
    into = [tensor.permute(0, 2, 1, 3) for tensor in outputs]
    batch, heads, rows, features = query.shape
    columns = key.shape[2]
    p = dropped_share(subgraph)
    statistics = torch.empty(batch * heads * rows * 2, dtype=torch.float32, device=query.device)
    words = inputs[6].view(torch.int32) if p else statistics
    addend, added_strides = _added(subgraph, inputs, query, key)
    last = (*added_strides, heads, rows, columns, factor(subgraph), 1 - p)
    mask = (words, statistics if addend is None else addend)
    flags = {"FEATURES": features, "CAUSAL": causal(subgraph), "ADDS": addend is not None, "DROPS": p > 0}
    tiles = {side: {"ROWS": params[f"{side}_rows"], "COLUMNS": params[f"{side}_columns"]} for side in ("query", "key")}
    options = {
        side: flags | tile | {
            "EVEN": rows % tile["ROWS"] == columns % tile["COLUMNS"] == 0,
            "num_warps": params[f"{side}_warps"], "num_stages": params["stages"],
        }
        for side, tile in tiles.items()
    }  # fmt: skip
    first = Program(
        of_queries,
        (-(-rows // tiles["query"]["ROWS"]), batch * heads),
        (
            query, key, value, out, gradient, into[0], inputs[5], statistics, *mask,
            *_strides(query, key, value, out, gradient, into[0]), *last,
        ),
        options["query"],
    )  # fmt: skip
    second = Program(
        of_keys,
        (-(-columns // tiles["key"]["COLUMNS"]), batch * heads),
        (
            query, key, value, gradient, into[1], into[2], statistics, *mask,
            *_strides(query, key, value, gradient, into[1], into[2]), *last,
        ),
        options["key"],
    )  # fmt: skip

    def run() -> None:
        first()
        second()

    return run


def _programs() -> tuple[Any, Any, Any]:
    """Import the programs: of forward, and of queries and of keys and values in backward.

    Raises:
        KernelError: Triton is not installed.
    """
    try:
        from autotuner.kernels.triton import attention_backward, attention_forward
    except ImportError as error:
        raise KernelError(f"attention's own programs need triton, which cannot be imported: {error}") from None
    return attention_forward.forward, attention_backward.query_gradient, attention_backward.key_value_gradient


def _strides(*operands: Tensor) -> list[int]:
    """Return the strides along batch, heads and rows of operands whose features are contiguous."""
    return [stride for operand in operands for stride in operand.stride()[:3]]


def _added(subgraph: Subgraph, inputs: Sequence[Tensor], query: Tensor, key: Tensor) -> tuple[Tensor | None, list[int]]:
    """Return what is added to the scores of a batch entry and a key, or None, and its strides along these."""
    spread = added(subgraph, inputs, query, key)
    return spread, [0, 0] if spread is None else [spread.stride(0), spread.stride(3)]
