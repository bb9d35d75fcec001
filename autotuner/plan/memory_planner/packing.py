"""Packing of live ranges into one arena."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

ALIGNMENT_BYTES = 64
REPAIRS = 48


@dataclass(frozen=True, slots=True)
class LiveRange:
    """The live range of so many bytes: from one tick to another, both included."""

    size_bytes: int
    first: int
    last: int

    @property
    def padded_bytes(self) -> int:
        return -(-self.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def meets(self, other: "LiveRange") -> bool:
        return self.first <= other.last and other.first <= self.last


def needed_bytes(blocks: Sequence[LiveRange]) -> int:
    """Return the most bytes that are needed at one time: no arena is smaller."""
    return max(
        (sum(b.padded_bytes for b in blocks if b.first <= t <= b.last) for t in {b.first for b in blocks}), default=0
    )


def pack(blocks: Sequence[LiveRange]) -> tuple[tuple[int, ...], int]:
    """Return where each block starts, and the arena's bytes. Blocks that are needed at one time share no byte.

    Several orders are tried, each with each block in the tightest gap that is free while it lives, and with it in the
    lowest one. The best is then repaired: whatever ends at the arena's end is placed earlier. It ends where no arena
    can be smaller.

    Cost:
        O(n**2 log n) for n blocks and each of at most 56 tries.

    Source:
        Sekiyama et al., Profile-guided memory optimization for deep neural networks (2018); Pisarchyk and Lee,
        Efficient memory management for deep neural net inference (2020).
    """
    least = needed_bytes(blocks)
    rivals = [[k for k, other in enumerate(blocks) if k != i and block.meets(other)] for i, block in enumerate(blocks)]
    best: tuple[int, list[int], list[int]] | None = None
    for order in _orders(blocks):
        for tightest in (True, False):
            starts, end = _placed(blocks, rivals, order, tightest)
            if best is None or end < best[0]:
                best = (end, starts, order)
            if end == least:
                return tuple(starts), end
    if best is None:
        return (), 0
    end, starts, order = best
    for _ in range(REPAIRS):
        late = [i for i in order if starts[i] + blocks[i].padded_bytes == end]
        order = [*late, *(i for i in order if i not in late)]
        starts, end = _placed(blocks, rivals, order, tightest=False)
        if end < best[0]:
            best = (end, starts, order)
        if end == least:
            break
    return tuple(best[1]), best[0]


def pack_apart(blocks: Sequence[LiveRange], boundary: int) -> tuple[tuple[int, ...], int, int]:
    """Return where each block starts, where what is alive across a tick ends, and the arena's bytes.

    Blocks that live both before and after the boundary come first, one behind the other. Each of the others lies in
    their memory, while they do not need it, or behind all of them; none lies partly in both.
    """
    starts = [-1] * len(blocks)
    kept_bytes = 0
    for i, block in enumerate(blocks):
        if block.first < boundary < block.last:
            starts[i] = kept_bytes
            kept_bytes += block.padded_bytes
    behind = []
    for i in sorted((i for i, start in enumerate(starts) if start < 0), key=lambda i: (-blocks[i].padded_bytes, i)):
        size = blocks[i].padded_bytes
        taken = sorted(
            (start, start + blocks[k].padded_bytes)
            for k, start in enumerate(starts) if start >= 0 and blocks[k].meets(blocks[i])
        )  # fmt: skip
        free = 0
        for start, stop in [*taken, (kept_bytes, kept_bytes)]:
            if start - free >= size:
                starts[i] = free
                break
            free = max(free, stop)
        else:
            behind.append(i)
    found, scratch_bytes = pack([blocks[i] for i in behind])
    for i, start in zip(behind, found, strict=True):
        starts[i] = kept_bytes + start
    return tuple(starts), kept_bytes, kept_bytes + scratch_bytes


def side_by_side(blocks: Sequence[LiveRange]) -> tuple[tuple[int, ...], int]:
    """Return the same where no two blocks share a byte."""
    *starts, end = accumulate((block.padded_bytes for block in blocks), initial=0)
    return tuple(starts), end


def _orders(blocks: Sequence[LiveRange]) -> Iterator[list[int]]:
    keys: tuple[Callable[[LiveRange], tuple[int, ...]], ...] = (
        lambda b: (-b.padded_bytes, b.first),
        lambda b: (-b.padded_bytes * (b.last - b.first + 1), b.first),
        lambda b: (b.first - b.last, -b.padded_bytes),
        lambda b: (b.first, -b.padded_bytes),
        lambda b: (-b.last, -b.padded_bytes),
    )
    for key in keys:
        yield sorted(range(len(blocks)), key=lambda i, key=key: (*key(blocks[i]), i))  # type: ignore[misc]


def _placed(
    blocks: Sequence[LiveRange], rivals: Sequence[Sequence[int]], order: Sequence[int], tightest: bool
) -> tuple[list[int], int]:
    """Return starts and end of blocks that are placed one after the other, in the tightest gap or in the lowest."""
    starts = [-1] * len(blocks)
    end = 0
    for i in order:
        size = blocks[i].padded_bytes
        taken = sorted((starts[k], starts[k] + blocks[k].padded_bytes) for k in rivals[i] if starts[k] >= 0)
        free, gaps = 0, []
        for start, stop in taken:
            if start - free >= size:
                gaps.append((start - free if tightest else 0, free))
            free = max(free, stop)
        starts[i] = min(gaps)[1] if gaps else free
        end = max(end, starts[i] + size)
    return starts, end
