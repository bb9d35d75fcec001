"""Parameters that processes update a share of each, and send while they update more; other processes are made up."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from autotuner.runtime.gradient_bucket import Bucket
from autotuner.runtime.parameter_gather import PARTS, ParameterGather, parts_of

WIDTH, MINE = 8, 1
SENT = 7.0
"""What other processes send."""


class Late:
    """Work that is done when it is waited for, and not before."""

    def __init__(self, events: list[str], told: str, do: Callable[[], object]) -> None:
        self._events, self._told, self._do = events, told, do

    def wait(self) -> None:
        if self._told:
            self._events.append(self._told)
            self._told = ""
            self._do()


class Others:
    """Peers that send numbers for their parameters; until a broadcast is waited for, nothing is known of its memory."""

    rank = MINE

    def __init__(self, events: list[str], numbers: dict[int, int]) -> None:
        self._events, self._numbers = events, numbers

    def broadcast(self, flat: Tensor, source: int) -> Late:
        number = self._numbers[flat.data_ptr()]
        self._events.append(f"send {number}" if source == MINE else f"receive {number}")
        if source == MINE:
            return Late(self._events, f"sent {number}", lambda: None)
        flat.fill_(torch.nan)
        return Late(self._events, f"received {number}", partial(flat.fill_, SENT))

    def wait(self, work: Any) -> None:
        work.wait()


def gathered(owners: list[int]) -> tuple[list[str], list[nn.Parameter]]:
    """Return what happens in a gather of a bucket for each owner, and the parameters behind it, which were zeros."""
    events: list[str] = []
    parameters = [nn.Parameter(torch.zeros(WIDTH)) for _ in owners]
    buckets = [Bucket([parameter], owner) for parameter, owner in zip(parameters, owners, strict=True)]
    numbers = {}
    for number, bucket in enumerate(buckets):
        bucket.begin()
        flat = bucket.fill().fill_(torch.nan)
        numbers[flat.data_ptr()] = number
        bucket.work = Late(events, f"reduced {number}", partial(flat.fill_, 1.0))
    optimizer = SGD(parameters, lr=1.0)
    for parameter, owner in zip(parameters, owners, strict=True):
        if owner != MINE:
            parameter.grad = None
    gather = ParameterGather(buckets, Others(events, numbers))  # type: ignore[arg-type]

    def update(number: int) -> None:
        moved = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        assert moved == [id(parameter) for parameter in gather.parts[number]]
        events.append("update " + " ".join(str(places[each]) for each in moved))
        optimizer.step()

    places = {id(parameter): number for number, parameter in enumerate(parameters)}
    gather.run(optimizer, update)
    assert [id(each) for each in optimizer.param_groups[0]["params"]] == [id(each) for each in parameters]
    return events, parameters


def test_a_part_is_sent_before_the_next_one_is_updated() -> None:
    events, _ = gathered([MINE, 0, MINE])
    assert events == [
        "reduced 0", "update 0", "send 0", "reduced 1", "receive 1", "reduced 2", "update 2", "send 2",
        "sent 0", "received 1", "sent 2",
    ]  # fmt: skip


@pytest.mark.parametrize("owners", [[0, 1], [1, 0, 1, 0], [1] * 9 + [0] * 9, [0, 0], [1, 1], [0, 1, 2, 2, 1, 0, 1]])
def test_all_parameters_are_whole_when_it_is_over(owners: list[int]) -> None:
    events, parameters = gathered(owners)
    for parameter, owner in zip(parameters, owners, strict=True):
        assert parameter.tolist() == [-1.0 if owner == MINE else SENT] * WIDTH
    sends = [event for event in events if event.startswith(("send", "receive "))]
    assert [int(event.split()[1]) for event in sends] == list(range(len(owners)))  # one order in all processes


def test_parts_have_about_equal_bytes_and_are_few() -> None:
    def sizes(*given: int) -> list[list[int]]:
        buckets: Any = [SimpleNamespace(size=size) for size in given]
        return [[bucket.size for bucket in part] for part in parts_of(buckets)]

    assert sizes() == []
    assert sizes(4) == [[4]]
    assert sizes(4, 4, 4) == [[4], [4], [4]]
    assert sizes(*[1] * 8) == [[1, 1]] * PARTS
    assert sizes(1, 1, 100, 1, 1) == [[1, 1, 100], [1, 1]]
    assert len(sizes(*range(1, 50))) == PARTS
