from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotuner.plan.memory_planner.packing import LiveRange, needed_bytes, pack, pack_apart

BLOCKS = st.lists(
    st.builds(lambda size, first, length: LiveRange(size, first, first + length),
              st.integers(0, 1000), st.integers(0, 12), st.integers(0, 12)), max_size=14)  # fmt: skip


@settings(deadline=None)
@given(blocks=BLOCKS)
def test_what_is_needed_at_the_same_time_never_shares_bytes(blocks: list[LiveRange]) -> None:
    starts, arena_bytes = pack(blocks)
    for (one, start), (other, begin) in combinations(zip(blocks, starts, strict=True), 2):
        if one.meets(other):
            assert start + one.size_bytes <= begin or begin + other.size_bytes <= start
    assert needed_bytes(blocks) <= arena_bytes <= sum(block.padded_bytes for block in blocks)
    assert all(start % 64 == 0 for start in starts)


@settings(deadline=None)
@given(blocks=BLOCKS, boundary=st.integers(0, 24))
def test_behind_what_is_kept_lies_nothing_that_is_needed_before_and_after(
    blocks: list[LiveRange], boundary: int
) -> None:
    starts, kept_bytes, arena_bytes = pack_apart(blocks, boundary)
    for (one, start), (other, begin) in combinations(zip(blocks, starts, strict=True), 2):
        if one.meets(other):
            assert start + one.size_bytes <= begin or begin + other.size_bytes <= start
    kept = [block for block in blocks if block.first < boundary < block.last]
    assert kept_bytes == sum(block.padded_bytes for block in kept)
    for block, start in zip(blocks, starts, strict=True):
        assert start + block.padded_bytes <= kept_bytes or (block not in kept and start >= kept_bytes)
        assert start + block.padded_bytes <= arena_bytes


def test_a_block_of_one_phase_lies_in_kept_memory_that_is_free_then_or_behind() -> None:
    early, late, kept = LiveRange(64, 0, 1), LiveRange(128, 6, 7), LiveRange(64, 2, 5)
    assert pack_apart([early, late, kept], 4) == ((0, 64, 0), 64, 192)


def test_one_block_takes_the_place_of_another_that_is_over() -> None:
    starts, arena_bytes = pack([LiveRange(100, 0, 1), LiveRange(128, 2, 3)])
    assert (starts, arena_bytes) == ((0, 0), 128)


def test_nothing_needs_no_bytes() -> None:
    assert pack([]) == ((), 0)


def test_the_largest_first_is_not_always_the_smallest_arena() -> None:
    """With both blocks of 192 at the bottom, 384 bytes are taken."""
    blocks = [
        LiveRange(192, 0, 0),
        LiveRange(192, 3, 3),
        LiveRange(128, 0, 2),
        LiveRange(64, 2, 3),
        LiveRange(64, 1, 2),
    ]
    assert needed_bytes(blocks) == 320
    assert pack(blocks)[1] == 320


@pytest.mark.parametrize("count", [3, 40])
def test_a_chain_needs_two_links_at_a_time(count: int) -> None:
    starts, arena_bytes = pack([LiveRange(64, i, i + 1) for i in range(count)])
    assert arena_bytes == 128
    assert all(one != other for one, other in pairwise(starts))
