"""Dropout masks drawn by a counter-based generator in one compiled kernel; torch's own ways are in `elementwise`."""

from collections.abc import Iterator
from itertools import permutations

from autotuner.kernels.registry import KERNELS, Kernel
from autotuner.records import Subgraph


def raw_mask_layouts(subgraph: Subgraph) -> Iterator[tuple[str, ...]]:
    """Enumerate every memory order of a raw mask: the kernel fills memory as it lies."""
    (mask,) = subgraph.outputs
    for order in permutations(subgraph.tensors[mask].axes):
        yield ("".join(order),)


KERNELS.add(
    Kernel(
        "inductor_threefry", ("dropout_mask",), "autotuner.kernels.torch_cpu.dropout:threefry", compiles=True,
        numerics="unbiased", layouts=raw_mask_layouts,
    )
)  # fmt: skip
