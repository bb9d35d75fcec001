"""Gradients that an operator hands out: none shares memory with another one, or with what it was given."""

import torch

from autotuner.runtime.gradient_stacks import without_shared_memory


def test_tensors_that_share_memory_with_others_are_copied() -> None:
    given, alone, both = torch.ones(4), torch.full((3,), 2.0), torch.arange(6.0)
    made = without_shared_memory([given, alone, both[:3], both[3:], torch.ones(4)[1:]], [None, given])
    assert [each.tolist() for each in made] == [[1.0] * 4, [2.0] * 3, [0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [1.0] * 3]
    assert made[1] is alone
    for each in made:
        each.add_(7)  # as who takes gradients over does
    assert given.tolist() == [1.0] * 4
    assert both.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert all(not each.storage_offset() for each in made)
