"""Dropout masks drawn by a counter-based generator, at once or as a seed; torch's own ways are in `elementwise`."""

from collections.abc import Iterator
from functools import partial

from autotuner.ir.records import Candidate, Subgraph
from autotuner.kernels.geometry import memory_orders
from autotuner.kernels.patterns import Draws, Operators
from autotuner.kernels.registry import KERNELS, Kernel


def raw_mask_layouts(subgraph: Subgraph) -> Iterator[tuple[str, ...]]:
    """Enumerate memory orders of a raw mask: the kernel fills memory as it lies."""
    (mask,) = subgraph.outputs
    for order in memory_orders(subgraph.tensors[mask].axes):
        yield (order,)


def seed_layouts(subgraph: Subgraph) -> Iterator[tuple[str, ...]]:
    """Enumerate a seed for each of those memory orders: it means another mask in each."""
    for (layout,) in raw_mask_layouts(subgraph):
        yield (f"{layout}:seed",)


def no_seed_asked(_subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say that the kernel makes a seed only, or None where it is asked for one."""
    (form,) = candidate.parsed_forms()
    return None if form.storage == "seed" else f"it makes a seed; {form} is none"


def byte_mask_layouts(subgraph: Subgraph) -> Iterator[tuple[str, ...]]:
    """Enumerate memory orders of a mask of bytes."""
    for (layout,) in raw_mask_layouts(subgraph):
        yield (f"{layout}:byte",)


def bit_mask_layouts(subgraph: Subgraph) -> Iterator[tuple[str, ...]]:
    """Enumerate memory orders of a mask of bits; of several masks the declared ones only."""
    if len(subgraph.outputs) > 1:
        yield tuple(f"{subgraph.tensors[number].axes}:bit" for number in subgraph.outputs)
        return
    for (layout,) in raw_mask_layouts(subgraph):
        yield (f"{layout}:bit",)


def no_bits_asked(_subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say that the kernel makes bits only, or None where it is asked for them."""
    strange = [str(form) for form in candidate.parsed_forms() if form.storage != "bit"]
    return f"it makes masks of bits; {strange[0]} is none" if strange else None


_MASK = ("dropout_mask",)
_DROPOUT = "autotuner.kernels.inductor.dropout"
_mask = partial(Kernel, covers=_MASK, numerics="unbiased")
KERNELS.add(
    _mask("inductor_threefry", runs=f"{_DROPOUT}:threefry", compiles=True, layouts=raw_mask_layouts),
    _mask("inductor_threefry_bytes", runs=f"{_DROPOUT}:threefry", compiles=True, layouts=byte_mask_layouts),
    _mask("torch_seed", runs=f"{_DROPOUT}:seed", refuses=no_seed_asked, layouts=seed_layouts, flat=("seed",)),
    _mask("cupy_mask_bits", runs="autotuner.kernels.cupy.bits:draw", refuses=no_bits_asked, compiles=True,
          layouts=bit_mask_layouts, flat=("bit",), patterns=(Operators(_MASK), Draws(_MASK))),
)  # fmt: skip
