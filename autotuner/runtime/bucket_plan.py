"""The buckets of gradients for one set of trained parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from autotuner.runtime.bucket_choice import SIZES, Arrival, buckets_of
from autotuner.runtime.gradient_bucket import Bucket

FIRST_LIMIT = SIZES[5]
"""Bytes of a bucket until times are known."""


@dataclass(eq=False)
class BucketPlan:
    """The buckets for one set of trained parameters.

    Args:
        order: of parameters that get gradients, as they come.
        silent: parameters without a gradient in any process so far.
        moving: buffers that steps write to.
        limit: bytes of a bucket.
        exchange_us: predicted time of all exchanges.
        exposed_us: what of it is behind backward; None before times are known.
    """

    order: list[nn.Parameter]
    silent: list[nn.Parameter]
    moving: list[Tensor]
    limit: int = FIRST_LIMIT
    exchange_us: float = 0.0
    exposed_us: float | None = None
    buckets: list[Bucket] = field(default_factory=list)
    bucket_of: dict[int, Bucket] = field(default_factory=dict)

    @property
    def is_timed(self) -> bool:
        return self.exposed_us is not None

    def begin(self) -> None:
        for bucket in self.buckets:
            bucket.begin()

    def divide(self, arrivals: Sequence[Arrival], limit: int, ranks: int) -> None:
        """Form buckets of so many bytes, and give each an owner."""
        self.limit, self.buckets = limit, []
        self._append(self.order, arrivals, ranks)
        self.begin()

    def add(self, parameters: Sequence[nn.Parameter], ranks: int) -> None:
        """Give parameters that were silent buckets behind the others."""
        added = {id(parameter) for parameter in parameters}
        self.silent = [parameter for parameter in self.silent if id(parameter) not in added]
        self.order.extend(parameters)
        self._append(parameters, [arrival(parameter) for parameter in parameters], ranks)

    def _append(self, parameters: Sequence[nn.Parameter], arrivals: Sequence[Arrival], ranks: int) -> None:
        load = [sum(bucket.size for bucket in self.buckets if bucket.owner == rank) for rank in range(ranks)]
        made = [Bucket([parameters[number] for number in numbers]) for numbers in buckets_of(arrivals, self.limit)]
        for bucket in sorted(made, key=lambda bucket: -bucket.size):
            bucket.owner = load.index(min(load))
            load[bucket.owner] += bucket.size
        self.buckets += made
        self.bucket_of |= {id(parameter): bucket for bucket in made for parameter in bucket.parameters}


def arrival(parameter: nn.Parameter, us: float = 0.0) -> Arrival:
    """Return the gradient of a parameter, as it comes in backward."""
    return Arrival(parameter.numel() * parameter.element_size(), (parameter.dtype, parameter.device), us)
