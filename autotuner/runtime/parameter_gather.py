"""Parameters that each process updates a share of: what one has updated goes to the others while it updates more.

Gradients are reduced to the owner of each bucket, which updates its parameters and sends them. All processes send
buckets in one order, and have all parameters when it is over: nothing that reads them has to wait for anything else.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autotuner.runtime.gradient_bucket import Bucket
from autotuner.runtime.one_pass_updates import OnePassUpdates
from autotuner.runtime.optimizer_parts import only
from autotuner.runtime.processes import Peers

PARTS = 4
"""Steps of the optimizer that a process takes, each for some of its buckets. The first one is all that nothing is sent
beside; more of them cost more of the host's time, where steps are not captured."""


class ParameterGather:
    """Gathers the parameters of buckets from the processes that update them.

    Attributes:
        parts: the parameters that this process updates, in parts.

    Args:
        buckets: of gradients, in the order in which parameters are sent; their gradients may still be on their way.
        peers: the processes.
    """

    def __init__(self, buckets: Sequence[Bucket], peers: Peers) -> None:
        self._buckets, self._peers = buckets, peers
        own = [bucket for bucket in buckets if bucket.owner == peers.rank]
        self._parts = parts_of(own)
        self.parts: list[list[nn.Parameter]] = [
            [p for bucket in part for p in bucket.parameters] for part in self._parts
        ]

    def run(self, optimizer: Optimizer, update: Callable[[int], object]) -> None:
        """Update this process's parameters, and gather all.

        Args:
            optimizer: of the parameters.
            update: takes the optimizer's step for a part, by its number, while the optimizer has no other parameters.
        """
        parts = iter(enumerate(self._parts))
        updated, works = set[int](), []
        for bucket in self._buckets:
            self._peers.wait(bucket.work)
            if bucket.owner == self._peers.rank and id(bucket) not in updated:
                number, part = next(parts)
                for each in part:
                    self._peers.wait(each.work)
                with only(optimizer, self.parts[number]):
                    update(number)
                with torch.no_grad():
                    for each in part:
                        each.pack_parameters()
                updated |= {id(each) for each in part}
            assert bucket.flat is not None
            works.append(self._peers.broadcast(bucket.flat, bucket.owner))
        for bucket, work in zip(self._buckets, works, strict=True):
            self._peers.wait(work)
            if bucket.owner != self._peers.rank:
                with torch.no_grad():
                    bucket.unpack_parameters()


class PartedUpdates:
    """Steps of `OnePassUpdates`, one of these for each part of the parameters that this process updates.

    Args:
        optimizer: of the parameters.
        parts: parameters that this process updates.
        gathers: returns the gather of the step that runs.
        make: makes the steps for the parameters that the optimizer has then.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parts: Sequence[Sequence[nn.Parameter]],
        gathers: Callable[[], ParameterGather],
        make: Callable[[], OnePassUpdates],
    ) -> None:
        self._optimizer, self._gathers = optimizer, gathers
        self._each = list[OnePassUpdates]()
        for parameters in parts:
            with only(optimizer, parameters):
                self._each.append(make())

    def step(self, norm: Tensor | None = None) -> None:
        """Take a step, by the norm of all gradients, where they are to be scaled."""
        self._gathers().run(self._optimizer, lambda number: self._each[number].step(norm))

    def written(self) -> "PartedUpdates":
        """Write the tables of the step that was captured; see `OnePassUpdates.written`."""
        for each in self._each:
            each.written()
        return self


def parts_of(buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    """Return buckets in parts of about equal bytes, in their order: `PARTS` at most."""
    share = sum(bucket.size for bucket in buckets) / PARTS
    parts, filled = list[list[Bucket]](), share
    for bucket in buckets:
        if filled >= share:
            parts.append([])
            filled = 0
        parts[-1].append(bucket)
        filled += bucket.size
    return parts
