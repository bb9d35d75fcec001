"""Rows of a gradient that are added where they belong, in place of ATen's own way to add them one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autotuner.kernels.torch.programs import gradients
from autotuner.kernels.triton.added_rows import add_rows_in_order, added_rows

ROWS, COLUMNS = 16, 128
INDEX = torch.tensor([3] * 40 + [-1] * 30 + [0, 5] * 15)
"""Many of some rows, none of most, and some counted from the end."""


def taken(table: Tensor, index: Tensor) -> Tensor:
    return table[index] * 2


def traced(function: Any, *operands: Tensor) -> Any:
    """Return the gradient of a function's first operand, as a graph of ATen's calls, with rows added in order."""
    mode = FakeTensorMode()
    given = (torch.ones_like(function(*operands)), *operands)
    with torch.no_grad(), mode:
        fakes = [mode.from_tensor(each, static_shapes=True) for each in given]
        found = make_fx(lambda grad, *given: gradients(function, [0], grad, given))(*fakes)
    add_rows_in_order(found.graph)
    found.graph.eliminate_dead_code()
    found.recompile()
    return found


def is_added_in_order(graph: Any) -> bool:
    return any(node.target is added_rows for node in graph.graph.nodes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(ROWS, COLUMNS), (ROWS, 4, 32)])
def test_rows_are_added_as_aten_adds_them(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randn(len(INDEX), *shape[1:], dtype=dtype)
    wanted = torch.zeros(shape, dtype=torch.float64).index_put((INDEX,), values.double(), accumulate=True)
    found = added_rows(values, INDEX, shape)
    assert (found.dtype, found.shape) == (dtype, shape)
    torch.testing.assert_close(found, wanted.to(dtype))


def test_the_gradient_of_a_table_is_added_in_order_and_is_autograds() -> None:
    table = torch.randn(ROWS, COLUMNS, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(len(INDEX), COLUMNS, dtype=torch.float64)
    graph = traced(taken, table.detach(), INDEX)
    assert is_added_in_order(graph)
    (wanted,) = torch.autograd.grad(taken(table, INDEX), table, grad)
    (found,) = graph(grad, table.detach(), INDEX)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def of_two(table: Tensor, index: Tensor) -> Tensor:
    return table[index, index]


def of_columns(table: Tensor, index: Tensor) -> Tensor:
    return table[:, index]


def of_a_square(table: Tensor, index: Tensor) -> Tensor:
    return table[index.view(10, -1)]


def of_a_mask(table: Tensor, index: Tensor) -> Tensor:
    return table.masked_fill((index[:ROWS] == 3)[:, None], 0)


@pytest.mark.parametrize(
    ("function", "columns"),
    [(taken, 8), (of_two, COLUMNS), (of_columns, COLUMNS), (of_a_square, COLUMNS), (of_a_mask, COLUMNS)],
)
def test_other_gradients_are_left_as_they_are(function: Any, columns: int) -> None:
    table = torch.randn(ROWS, columns, dtype=torch.float64, requires_grad=True)
    graph = traced(function, table.detach(), INDEX)
    assert not is_added_in_order(graph)
    made = function(table, INDEX)
    grad = torch.randn(made.shape, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(made, table, grad)
    torch.testing.assert_close(graph(grad, table.detach(), INDEX)[0], wanted, rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(16, 2048), (4096, 1000), (300, 64), (1, 128)])
def test_rows_are_added_on_a_gpu(dtype: torch.dtype, rows: int, columns: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(16384, columns, dtype=dtype, device="cuda")
    index = torch.randint(-rows, rows, (16384,), device="cuda")
    index[index.remainder(rows) == 7] = 0  # nothing is added to a row
    wanted = torch.zeros(rows, columns, dtype=torch.float64, device="cuda")
    wanted.index_put_((index,), values.double(), accumulate=True)
    found = added_rows(values, index, (rows, columns))
    assert torch.equal(found, added_rows(values, index, (rows, columns)))
    tolerance = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}[dtype]
    assert float((found.double() - wanted).abs().max()) <= tolerance * max(1.0, float(wanted.abs().max()))
