"""The buckets of gradients for one set of trained parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
        owners: ranks that update parameters, by `id`, where the optimizer's state is shared out: once one is chosen, it
            stays, for the state lies there. None where it is not.
        limit: bytes of a bucket.
        exchange_us: predicted time of all exchanges.
        exposed_us: what of it is behind backward; None before times are known.
        runs: steps with the buckets as they are.
    """

    order: list[nn.Parameter]
    silent: list[nn.Parameter]
    moving: list[Tensor]
    owners: dict[int, int] | None = None
    limit: int = FIRST_LIMIT
    exchange_us: float = 0.0
    exposed_us: float | None = None
    runs: int = 0
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
        known = {} if self.owners is None else self.owners
        there = [
            replace(each, place=(each.place, known.get(id(parameter))))
            for parameter, each in zip(parameters, arrivals, strict=True)
        ]
        made = [Bucket([parameters[number] for number in numbers]) for numbers in buckets_of(there, self.limit)]
        load = [0] * ranks
        for bucket in (*self.buckets, *made):
            if id(bucket.parameters[0]) in known:
                bucket.owner = known[id(bucket.parameters[0])]
                load[bucket.owner] += bucket.size
        for bucket in sorted(made, key=lambda bucket: -bucket.size):
            if id(bucket.parameters[0]) not in known:
                bucket.owner = load.index(min(load))
                load[bucket.owner] += bucket.size
        known.update((id(parameter), bucket.owner) for bucket in made for parameter in bucket.parameters)
        self.buckets += made
        self.bucket_of |= {id(parameter): bucket for bucket in made for parameter in bucket.parameters}
        self.runs = 0


def arrival(parameter: nn.Parameter, us: float = 0.0) -> Arrival:
    """Return the gradient of a parameter, as it comes in backward."""
    return Arrival(parameter.numel() * parameter.element_size(), (parameter.dtype, parameter.device), us)
