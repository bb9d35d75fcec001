"""Dropout masks as bits, several of them in one launch, by words of 32: see `keep_word` in the prelude.

The seed of 64 bits comes from torch's generator, so that `manual_seed` reproduces a mask; a word's place is the
counter. p is met to 2**-17, the scale stays that of p.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.records import Call
from autotuner.kernels.cupy.launch import compiled

THREADS = 256
WORD = 32
LEVELS = 1 << 16

TEXT = """
// Write the bytes of a word that the mask has.
DEVICE void put(uint8* mask, long long word, uint32 bits, long long bytes) {
    if (word * 4 + 4 <= bytes && (uint64)mask % 4 == 0) {
        reinterpret_cast<uint32*>(mask)[word] = bits;
        return;
    }
    for (int i = 0; i < 4 && word * 4 + i < bytes; ++i) mask[word * 4 + i] = (uint8)(bits >> 8 * i);
}
"""


def draw(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Draw every mask of a call."""
    subgraph, device = call.subgraph, outputs[0].device
    lines, words = [], 0
    for place, node in enumerate(subgraph.nodes):
        count = prod(subgraph.tensors[node.outputs[0]].extents)
        threshold = round(float(dict(node.attributes)["p"]) * LEVELS)
        own = -(-count // WORD)
        lines.append(
            f"    if (word < {own}) return put(a{place}, word, keep_word<{threshold}u>(word, {place}, *seed), "
            f"{outputs[place].numel()});\n    word -= {own};\n"
        )
        words += own
    masks = ", ".join(f"uint8* a{place}" for place in range(len(outputs)))
    head = f"KERNEL void THREADS_AT_MOST({THREADS}) draw(const uint64* seed, {masks}) {{\n"
    start = f"    long long word = (long long)blockIdx.x * {THREADS} + threadIdx.x;\n"
    module = compiled(f"{TEXT}{head}{start}{''.join(lines)}}}\n", device)
    lowest = torch.iinfo(torch.int64).min

    def run() -> None:
        seed = torch.empty(1, dtype=torch.int64, device=device).random_(lowest, None)
        module.launch("draw", -(-words // THREADS), THREADS, [seed, *outputs])

    return run
