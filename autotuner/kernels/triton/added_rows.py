"""Gradients of tables of which rows were taken: rows of a gradient, added up where they belong.

On a GPU, a Triton program sums those of each row; elsewhere, ATen does.

ATen sorts these as well, and then adds a row's own one behind the other. Where tokens go to a few experts, thousands
are added to the bias of each: of 16,384 rows of 2,048 elements onto 16, it takes 1.3 ms of an H200.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, fx

from autotuner.errors import KernelError
from autotuner.ir.records import Call
from autotuner.kernels.torch import programmed

aten = torch.ops.aten
_ADDING = (aten.index_put.default, aten._unsafe_index_put.default)
_ZEROS = (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)
COLUMNS_MIN = 64
"""Elements of a row, at least: of shorter ones, adding is not what takes the time."""
VALUES_OF_BYTE = 256
PROGRAMS = 1024
"""Programs that fill a device: a few long sums are made in parts."""
ROWS, COLUMNS = 4, 256
"""Of a tile that a program reads."""
_IN_FLOAT32 = (torch.bfloat16, torch.float16, torch.float32)


def traced(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Run the calls of one operator's gradients, as `programmed.traced`, with rows added in order."""
    return programmed.traced(call, inputs, outputs, add_rows_in_order)


def added_rows(values: Tensor, index: Tensor, shape: Sequence[int]) -> Tensor:
    """Return zeros to which rows are added: `aten.index_put` with `accumulate`, of one index.

    Sums are made in float32, or in float64 of float64, and rounded once.

    Args:
        values: (count, ...).
        index: (count,), int32 or int64; where each row is added, counted from the end where negative. A number that is
            no row's stands for its remainder.
        shape: (rows, ...), of the result.
    """
    rows = shape[0]
    numbers = index.remainder(rows)
    flat = values.flatten(1).contiguous()
    if not values.is_cuda or values.dtype not in _IN_FLOAT32:
        wide = flat.float() if values.dtype in _IN_FLOAT32 else flat
        return wide.new_zeros(rows, flat.shape[1]).index_add_(0, numbers, wide).to(values.dtype).view(list(shape))
    ordered, order = torch.sort(numbers.to(torch.uint8 if rows <= VALUES_OF_BYTE else torch.int32), stable=True)
    places = torch.arange(rows + 1, dtype=torch.int32, device=values.device)
    starts = torch.searchsorted(ordered.int(), places, out_int32=True)
    return summed(flat, order, starts, rows).view(list(shape))


def summed(values: Tensor, order: Tensor, starts: Tensor, rows: int) -> Tensor:
    """Return sums of rows that lie in order: (rows, columns), of the type of the values; see `add_rows`.

    Raises:
        KernelError: Triton is not installed.
    """
    try:
        from autotuner.kernels.triton.added_rows_program import add_rows
    except ImportError as error:
        raise KernelError(f"sums of rows need triton, which cannot be imported: {error}") from None
    columns = values.shape[1]
    tiles = -(-columns // COLUMNS)
    parts = max(1, min(PROGRAMS // (rows * tiles), len(values) // (rows * ROWS)))
    made = values.new_empty(parts, rows, columns, dtype=values.dtype if parts == 1 else torch.float32)
    add_rows[(rows, tiles, parts)](
        values, order, starts, made, rows, columns, ROWS=ROWS, COLUMNS=COLUMNS, PARTS=parts, num_warps=4
    )
    return made[0] if parts == 1 else made.sum(0).to(values.dtype)


def _is_of_rows(table: Tensor, index: Tensor, added: Tensor) -> bool:
    """Say whether whole rows are added to a table, each by one number."""
    alike = (added.dtype, added.device, added.shape[1:]) == (table.dtype, table.device, table.shape[1:])
    numbers = index.ndim == 1 and index.dtype in (torch.int32, torch.int64) and index.device == table.device
    return alike and numbers and table.ndim >= 2 and len(added) == len(index)


def _is_summed(table: Tensor) -> bool:
    """Say whether sums of rows are made as `added_rows` says, and are worth it; a GPU needs Triton for them."""
    on_cpu, in_float32 = table.device.type == "cpu", table.dtype in _IN_FLOAT32
    is_known = on_cpu or (in_float32 and find_spec("triton") is not None)
    return is_known and table.numel() >= COLUMNS_MIN * len(table)


def add_rows_in_order(graph: fx.Graph) -> None:
    """Have a graph of ATen's calls add rows by `added_rows` where it adds them to zeros by one index."""
    for node in list(graph.nodes):
        if node.target not in _ADDING or len(node.args) < 4 or not node.args[3]:
            continue
        zeros, indices, values, _ = node.args
        if zeros.target not in _ZEROS or len(indices) != 1 or indices[0] is None:
            continue
        table, index, added = (each.meta["val"] for each in (zeros, indices[0], values))
        if not _is_of_rows(table, index, added) or not _is_summed(table):
            continue
        with graph.inserting_before(node):
            made = graph.call_function(added_rows, (values, indices[0], list(table.shape)))
        made.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(made)
        graph.erase_node(node)
