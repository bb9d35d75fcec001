"""Tensors that a region makes, with the strides that torch gives them."""

import pytest
import torch

from autotuner.runtime.capture.rearranging import with_strides

SHAPE = (2, 3, 4, 5)


def made() -> torch.Tensor:
    return torch.randn(2, 3, 1, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (3, 1, 2, 0)])
def test_a_repeated_tensor_in_another_order_keeps_its_values_and_gradients(order: tuple[int, ...]) -> None:
    """As keys are that several heads share, where a plan has heads before sequences."""
    wanted = torch.empty([SHAPE[dim] for dim in order]).permute([order.index(dim) for dim in range(4)]).stride()
    strides = [0 if dim == 2 else stride for dim, stride in enumerate(wanted)]
    weights = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    base = made()
    found = with_strides(base.expand(SHAPE), SHAPE, strides)
    torch.testing.assert_close(found, base.expand(SHAPE))
    assert list(found.stride()) == strides
    (found * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert base.grad is not None
    torch.testing.assert_close(base.grad, weights.sum(2, keepdim=True))


def test_a_tensor_with_these_strides_stays_itself() -> None:
    tensor = made()
    assert with_strides(tensor, tensor.shape, tensor.stride()) is tensor
    turned = with_strides(tensor, tensor.shape, (15, 5, 99, 1))  # nothing is moved along a dimension of one
    assert turned is tensor
