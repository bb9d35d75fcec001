"""Gradients that a plan writes to memory of somebody else."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autotuner.plan.memory_planner import Geometry
from autotuner.runtime.offered_memory import bases_in

ROWS, WIDTH = 4, 16
EACH = ROWS * WIDTH


def plan(stacked: int, elements: int | None = None, role: str = "output", dtype: str = "float32") -> Any:
    """Return what is asked of a plan with one buffer, in which so many gradients lie one behind the other."""
    buffer = SimpleNamespace(role=role, dtype=dtype, elements=stacked * EACH if elements is None else elements)
    return SimpleNamespace(
        buffers=[buffer],
        geometry=lambda port, prefix: Geometry(0, port * EACH, (ROWS, WIDTH), (WIDTH, 1)) if prefix else None,
    )


def ports(stacked: int) -> Any:
    return SimpleNamespace(sources=range(stacked))


def places(*begins: int, strides: tuple[int, int] = (WIDTH, 1)) -> tuple[Tensor, list[Tensor]]:
    memory = torch.zeros(8 * EACH)
    return memory, [memory.as_strided((ROWS, WIDTH), strides, begin) for begin in begins]


@pytest.mark.parametrize("stacked", [1, 3])
def test_a_buffer_is_over_the_places_of_its_gradients_and_a_storage_of_its_own(stacked: int) -> None:
    memory, given = places(*(EACH * (2 + number) for number in range(stacked)))
    base = bases_in(plan(stacked), ports(stacked), given)[0]
    assert (base.shape, base.storage_offset()) == ((stacked * EACH,), 0)
    assert base.untyped_storage().data_ptr() == given[0].data_ptr()
    base.fill_(1)
    assert memory.nonzero().flatten().tolist() == list(range(2 * EACH, (2 + stacked) * EACH))


def test_a_buffer_is_nowhere_else_where_its_places_lie_otherwise() -> None:
    one, two = plan(1), plan(2)
    _, apart = places(0, 2 * EACH)
    _, turned = places(EACH, 0)
    _, transposed = places(0, strides=(1, ROWS))
    _, behind = places(0, EACH)
    assert bases_in(two, ports(2), behind).keys() == {0}
    assert bases_in(two, ports(2), apart) == {}
    assert bases_in(two, ports(2), turned) == {}
    assert bases_in(two, ports(2), [behind[0], None]) == {}
    assert bases_in(two, ports(2), [None, behind[1]]) == {}
    assert bases_in(two, ports(2), ()) == {}
    assert bases_in(one, ports(1), transposed) == {}
    assert bases_in(plan(1, elements=2 * EACH), ports(1), behind[:1]) == {}
    assert bases_in(plan(1, role="arena"), ports(1), behind[:1]) == {}
    assert bases_in(plan(1, dtype="bfloat16"), ports(1), behind[:1]) == {}


def test_kernels_are_measured_on_aligned_memory_and_get_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (first, second) = places(0, 1)
    shifted = second if first.data_ptr() % 256 == 0 else first
    assert bases_in(plan(1), ports(1), [shifted]).keys() == {0}  # a processor reads any
    monkeypatch.setattr("autotuner.runtime.offered_memory.alignment_bytes", lambda _: 256)
    assert bases_in(plan(1), ports(1), [shifted]) == {}
