"""A device and everything that measuring asks of it; each type of device has a module that answers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autotuner.ir.records import Scalar
from autotuner.measure.policy import Policy

if TYPE_CHECKING:
    from autotuner.measure.timer import Timer

HELD_SHARE = 4
"""Operand sets take at most this part of memory."""


@dataclass(frozen=True, slots=True)
class Device(ABC):
    """Something that kernels run on. `index` tells devices of one type apart, `policy_type` is that of its policies."""

    policy_type: ClassVar[type[Policy]]

    device_type: str
    name: str
    index: int = 0

    @property
    @abstractmethod
    def lock_name(self) -> str:
        """The name of the file that is locked while something is timed."""

    @property
    @abstractmethod
    def compilers(self) -> int:
        """The number of processes that compile kernels at once."""

    @property
    @abstractmethod
    def compiles_beside(self) -> bool:
        """True where compiling does not disturb timings: the two do not share what computes."""

    @property
    @abstractmethod
    def is_in_use(self) -> bool:
        """True while this process computes on it in a way that other processes see."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """The memory that there is: no tensor is larger."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """The memory that operand sets may take before they make room for each other."""

    @abstractmethod
    def facts(self, threads: int | None) -> dict[str, Scalar]:
        """Return what makes timings comparable, beside name and policy; for the CPU without importing torch.

        Raises:
            DeviceError: it has fewer cores than threads are asked for.
        """

    @abstractmethod
    def policy(self, threads: int | None = None, rotate_bytes: int | None = None) -> Policy:
        """Return how timings are taken; operands rotate through its own number of bytes where none is stated."""

    @abstractmethod
    def rotate_bytes(self, half_step_bytes: int) -> int | None:
        """Return through how many bytes operands rotate for half a step's working set; None for the policy's own."""

    @abstractmethod
    def timer(self, policy: Policy, *, parent_computes: bool) -> "Timer":
        """Return how calls are timed in this process.

        Args:
            parent_computes: whether the process that started this one computes on the device as well.
        """

    @abstractmethod
    def allocated_bytes(self, run: Callable[[], object]) -> int:
        """Return the most bytes that torch allocates at any time while a function runs, beyond what was before it."""
