"""scripts/bench_packed: its batches, its masks of other kernels, and its page."""

import argparse
from types import ModuleType
from typing import Any

import pytest
import torch

import autotuner
from tests.script import script

LENGTHS = [5, 9, 1, 12]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return script("bench_packed")


def test_lengths_are_half_padding_and_batches_nearly_full(bench: ModuleType) -> None:
    lengths = bench.drawn_lengths(argparse.Namespace(lengths=None, length=512))
    assert max(lengths) == 512
    assert sum(lengths) / len(lengths) == pytest.approx(256, rel=0.1)
    batches = bench.filled(lengths, 16384)
    assert len(batches) == bench.BATCHES
    assert all(0.99 * 16384 < sum(own) <= 16384 for own in batches)


def test_buckets_have_similar_lengths_and_two_batches_at_least(bench: ModuleType) -> None:
    lengths = bench.drawn_lengths(argparse.Namespace(lengths=None, length=512))
    rows, widths = bench.bucketed(lengths, 32)
    assert len(rows) == bench.OF_BUCKETS
    assert {len(own) for own in rows} == {32}
    assert all(max(own) <= width for own, width in zip(rows, widths, strict=True))
    assert len(set(widths)) == 4
    assert min(widths.count(width) for width in widths) >= 2
    tokens = sum(map(sum, rows))
    assert tokens / sum(32 * width for width in widths) > 0.85  # as against a half of those padded to 512
    assert tokens / (32 * len(rows)) == pytest.approx(sum(lengths) / len(lengths), rel=0.05)


@pytest.mark.parametrize("causal", [False, True])
def test_other_kernels_see_what_packed_attention_sees(bench: ModuleType, causal: bool) -> None:
    slots = 32
    positions = torch.cat([*(torch.arange(length) for length in LENGTHS), torch.zeros(slots - sum(LENGTHS))])
    bounds = autotuner.packed_bounds(positions.long(), causal=causal)
    place = torch.arange(slots)
    wanted = (place >= bounds[:, :1]) & (place < bounds[:, 1:])
    mask = bench.documents(LENGTHS, slots, causal, "cpu").mask_mod
    assert torch.equal(mask(None, None, place[:, None], place[None]), wanted)
    begins = bench.offsets(LENGTHS, 128).flatten()
    assert begins.tolist() == [0, 5, 14, 15, 27] + [128] * 28  # as many as there may be; the last have no tokens


def test_the_page_says_what_did_not_run(bench: ModuleType) -> None:
    about = {"device": "a device", "torch": "2.11", "date": "today", "commit": "abc", "length": 512, "batch": 32}
    row: dict[str, Any] = {"case": "bert-large", "side": bench.PACKED, "ms": 100.0, "tokens": 16000.0}
    row |= {"tokens_per_s": 160000.0, "allocated_bytes": 1 << 30, "reserved_bytes": 2 << 30}
    lines = bench.page(about, [row, {"case": "bert-large", "side": bench.FLEX, "ms": None, "note": "it ended with 1"}])
    assert "| packed, torch.compile | 160,000 | 100.0 | 16,000 | 1024.0 | 2048.0 |" in lines.splitlines()
    assert lines.splitlines()[-1] == "| FlexAttention | it ended with 1 |  |  |  |  |"
