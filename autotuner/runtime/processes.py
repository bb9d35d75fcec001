"""Processes that train one model together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from socket import gethostname
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor, distributed

from autotuner.errors import InputError, PeerLostError, first_line
from autotuner.runtime.devices import DeviceRuntime

PROBE_RUNS = 4
"""Exchanges that are timed."""
_ON_HOST: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()
"""Groups of the same processes that speak on the host, by the group that does not."""


def are_several(group: Any = None) -> bool:
    """Say whether this process trains one model with others, as torch's process group says.

    Args:
        group: of torch; all processes by default.
    """
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size(group) > 1


class Peers:
    """The processes of a group, this one among them. Each method is called by all of them, in one order.

    What is said on the host goes by a backend for the CPU: it waits for no device, and a process that has died is
    noticed at once.

    Attributes:
        is_lost: whether one of them is lost, so that what was queued on the device may never end.

    Args:
        group: of torch; all processes by default.

    Raises:
        InputError: this process is not in the group.
        PeerLostError: in any method: another process has ended, or did not answer in time.
    """

    def __init__(self, group: Any = None) -> None:
        self.group: Any = group
        if group is None:
            self.group = distributed.group.WORLD
        self.rank, self.size = distributed.get_rank(self.group), distributed.get_world_size(self.group)
        self.is_lost = False
        if self.rank < 0:
            raise InputError("this process is not in the process_group: give one that it belongs to, or none for all")
        self._host: Any = self.group
        if torch.device("cpu") not in self.group._device_types:
            if self.group not in _ON_HOST:
                ranks = distributed.get_process_group_ranks(self.group)
                with self.answering():
                    made = distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)
                _ON_HOST[self.group] = made
            self._host = _ON_HOST[self.group]

    def averages(self, device: torch.device) -> bool:
        """Say whether the group's backend for a device averages by itself, and in graphs: NCCL does."""
        return f"{device.type}:nccl" in distributed.get_backend_config(self.group).split(",")

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Say of an error of a collective that another process is lost."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self.is_lost = True
            raise PeerLostError(
                f"process {self.rank} of {self.size} waits for another one, which has ended or does not answer; its "
                "own log says why. What was trained since the last checkpoint is lost: start all anew "
                f"({first_line(error)})"
            ) from error

    def told(self, values: Sequence[int]) -> list[list[int]]:
        """Return what each process says, by rank: as many numbers from each."""
        own = torch.tensor(values, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.size)]
        with self.answering():
            distributed.all_gather(found, own, group=self._host)
        return [each.tolist() for each in found]

    def told_by_first(self, values: Sequence[int]) -> list[int]:
        """Return what the first process says: as many numbers as this one has."""
        found = torch.tensor(values, dtype=torch.int64)
        with self.answering():
            distributed.broadcast(found, group=self._host, group_src=0)
        return [int(each) for each in found.tolist()]

    def objects(self, own: Any) -> list[Any] | None:
        """Return an object of each process, by rank, to the first one; None to the others."""
        found = [None] * self.size if self.rank == 0 else None
        with self.answering():
            distributed.gather_object(own, found, group=self._host, group_dst=0)
        return found

    def once_per_host(self, work: Callable[[], Any]) -> None:
        """Have the first process of each host do some work, that of this group's first process before the others."""
        hosts = [host for (host,) in self.told([crc32(gethostname().encode())])]
        is_first_here = hosts.index(hosts[self.rank]) == self.rank
        for number in range(2):
            if is_first_here and (hosts[self.rank] == hosts[0]) == (number == 0):
                work()
            self.told([number])

    def check_alike(self, parameters: Sequence[Tensor]) -> None:
        """Check that all processes train parameters of the same shapes and types.

        Raises:
            InputError: they do not.
        """
        shapes = [f"{tuple(p.shape)} {p.dtype}" for p in parameters]
        counts = [own for (own,) in self.told([len(shapes)])]
        if len(set(counts)) > 1:
            raise InputError(f"processes train other numbers of parameters, by rank {counts}: give all the same model")
        for number, sums in enumerate(zip(*self.told([crc32(each.encode()) for each in shapes]), strict=True)):
            if len(set(sums)) > 1:
                raise InputError(
                    f"parameter {number} of the optimizer is {shapes[number]} in process {self.rank}, and another "
                    "elsewhere: give all processes the same model"
                )

    def all_reduce(self, tensor: Tensor, *, averages: bool) -> Any:
        """Begin to add a tensor up over all processes, in place, or to average it; return what is waited for."""
        with self.answering():
            return distributed.all_reduce(tensor, _operation(averages), group=self.group, async_op=True)

    def reduce(self, tensor: Tensor, target: int, *, averages: bool) -> Any:
        """Begin to add a tensor up into that of one process; elsewhere it is undefined then."""
        with self.answering():
            return distributed.reduce(
                tensor, op=_operation(averages), group=self.group, group_dst=target, async_op=True
            )

    def broadcast(self, tensor: Tensor, source: int) -> Any:
        """Begin to copy a contiguous tensor of one process to the others."""
        with self.answering():
            return distributed.broadcast(tensor, group=self.group, group_src=source, async_op=True)

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Write the first process's values to tensors of all."""
        for tensor in tensors:
            value = tensor.detach().contiguous()
            self.wait(self.broadcast(value, 0))
            if value.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(value)

    def exchange_us(self, size: int, runtime: DeviceRuntime) -> float:
        """Return the least time of some exchanges of so many bytes on a device."""
        tensor, found = torch.zeros(size // 4, device=runtime.device), []
        for _ in range(PROBE_RUNS):
            began = runtime.mark()
            self.wait(self.all_reduce(tensor, averages=False))
            found.append(runtime.elapsed_us(began, runtime.mark()))
        return min(found)

    def wait(self, work: Any) -> None:
        """Have what is queued from now on wait for what was begun."""
        with self.answering():
            work.wait()


def _operation(averages: bool) -> Any:
    return distributed.ReduceOp.AVG if averages else distributed.ReduceOp.SUM
