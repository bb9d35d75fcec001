"""Conversions from one storage format to another: of dropout masks, of what is read for its sign, and to 8 bits.

They are compiled loops over memory as it lies, once through for each. A loop over booleans,
or from integers to bytes, compiles to scalar code that is 5 to 40 times slower (torch 2.13, Xeon with AVX-512), so
bytes are made from floats, and eight elements are treated as one 64-bit number.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config

from autotuner.ir.formats import BITS, GROUP
from autotuner.ir.records import Call
from autotuner.kernels.inductor.fused import compiled_for
from autotuner.kernels.torch.elementwise import in_memory_order
from autotuner.kernels.torch.formats import quantized, split_int8
from autotuner.kernels.torch.masks import DRAWS, drawn_keeps, part_length

Run = Callable[[], Any]
Body = Callable[[Tensor, Tensor], tuple[()]]

WORD = 64
# Raw masks are packed through so many bytes of workspace: a share of a second-level cache.
CHUNK = 1 << 18
# Times this, the lowest bits of eight bytes meet in the highest byte, the first in its lowest bit.
GATHER = 0x0102040810204080
# A byte in all bytes; bit i of byte i; the lowest bit of each byte; all bits of each byte but the highest.
SPREAD = 0x0101010101010101
DIAGONAL = 0x8040201008040201 - (1 << WORD)
LOWEST = 0x0101010101010101
BELOW = 0x7F7F7F7F7F7F7F7F
KEPT_CALLS = 8
"""Element-wise calls behind which Inductor names a value of a generator that is read twice, in place of writing it out
for each reader: with its own 30, a mask takes three times as long to compile (5.1 s to 1.8 s), and runs 1.4 times as
long (torch 2.13, EPYC with AVX2). The loop stays one. On an H100 it changes nothing, and is left out."""


def cast(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """Turn a raw mask into bytes, or bytes into a raw mask."""
    source, target = _line(inputs[0]), _line(outputs[0])
    raw = source.dtype != torch.uint8
    body = _to_bytes if raw else _scaled(_p(call))
    compiled = _compiled(call, body, (source, target))
    return lambda: compiled([source, target])


def pack(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """Pack a mask into bits. A raw one is turned into bytes first, a part at a time."""
    source, bits = _line(inputs[0]), outputs[0]
    whole = source.numel() // BITS * BITS
    runs = [_packs_rest(source[whole:], bits[whole // BITS :], _to_bytes)] if whole < source.numel() else []
    if whole and source.dtype == torch.uint8:
        operands = [source[:whole].view(torch.int64), bits[: whole // BITS]]
        compiled = _compiled(call, _to_bits, operands)
        runs.append(lambda: compiled(list(operands)))
    elif whole:
        runs.append(_packs_raw(call, source[:whole], bits[: whole // BITS], _to_bytes))
    return _together(runs)


def pack_signs(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """Pack into bits which elements are above 0, or no numbers."""
    source, bits = _line(inputs[0]), outputs[0]
    whole = source.numel() // BITS * BITS
    rest = [_packs_rest(source[whole:], bits[whole // BITS :], _signs)] if whole < source.numel() else []
    return _together([*rest, *([_packs_raw(call, source[:whole], bits[: whole // BITS], _signs)] if whole else [])])


def _packs_raw(call: Call, source: Tensor, bits: Tensor, body: Body) -> Run:
    size = min(CHUNK, len(source))
    # The last part begins earlier where it would be shorter, so that all are compiled once.
    starts = [*range(0, len(source) - size, size), len(source) - size]
    parts = [(source[start : start + size], bits[start // BITS : (start + size) // BITS]) for start in starts]
    some = torch.empty(size, dtype=torch.uint8, device=source.device)
    to_bytes = _compiled(call, body, (parts[0][0], some))
    to_bits = _compiled(call, _to_bits, (some.view(torch.int64), parts[0][1]))

    def run() -> None:
        held = torch.empty(size, dtype=torch.uint8, device=source.device)
        eights = held.view(torch.int64)
        for part, packed in parts:
            to_bytes([part, held])
            to_bits([eights, packed])

    return run


def _packs_rest(source: Tensor, bits: Tensor, body: Body) -> Run:
    """Pack the last elements, fewer than fill a byte."""
    ones = torch.zeros(BITS, dtype=torch.uint8, device=source.device)
    eight, shorter = ones.view(torch.int64), ones[: len(source)]

    def run() -> None:
        body(source, shorter)
        _to_bits(eight, bits)

    return run


def unpack(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """Turn bits into a raw mask, or into bytes, of which one step makes 64."""
    bits, target = inputs[0], _line(outputs[0])
    step = WORD if target.dtype == torch.uint8 else BITS
    whole = target.numel() // step * step
    runs = [_unpacks_rest(bits[whole // BITS :], target[whole:], _p(call))] if whole < target.numel() else []
    if whole:
        full = bits[: whole // BITS]
        if target.dtype == torch.uint8:
            operands = [full.view(torch.int64), target[:whole].view(torch.int64).view(-1, BITS)]
            compiled = _compiled(call, _from_bits, operands)
        else:
            operands = [full, target[:whole].view(-1, BITS)]
            compiled = _compiled(call, _scaled_bits(_p(call)), operands)
        runs.append(lambda: compiled(list(operands)))
    return _together(runs)


def _unpacks_rest(bits: Tensor, target: Tensor, p: float) -> Run:
    places = torch.arange(BITS, dtype=torch.uint8, device=bits.device)

    def run() -> None:
        ones = ((bits[:, None] >> places) & 1).view(-1)[: len(target)]
        target.copy_(ones if target.dtype == torch.uint8 else ones.to(target.dtype) * (1 / (1 - p)))

    return run


def quantize(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """Write 8-bit integers and a scale for each group of them; the last group may be filled up with zeros."""
    source = _line(inputs[0])
    numbers, scales = split_int8(outputs[0])
    whole = source.numel() // GROUP
    runs: list[Run] = []
    if whole:
        operands = [source[: whole * GROUP].view(whole, GROUP), numbers[:whole], scales[:whole]]
        compiled = _compiled(call, _quantized, operands)
        runs.append(lambda: compiled(list(operands)))
    if whole < len(numbers):
        rest, filled = source[whole * GROUP :], source.new_zeros(1, GROUP)
        shorter = filled[0, : len(rest)]

        def run() -> None:
            shorter.copy_(rest)
            _quantized(filled, numbers[whole:], scales[whole:])

        runs.append(run)
    return _together(runs)


def dequantize(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """Write what 8-bit integers stand for."""
    numbers, scales = split_int8(inputs[0])
    target = _line(outputs[0])
    whole = target.numel() // GROUP
    runs: list[Run] = []
    if whole:
        operands = [numbers[:whole], scales[:whole], target[: whole * GROUP].view(whole, GROUP)]
        compiled = _compiled(call, _dequantized, operands)
        runs.append(lambda: compiled(list(operands)))
    if whole < len(numbers):
        rest = target[whole * GROUP :]
        runs.append(lambda: rest.copy_((numbers[whole] * scales[whole])[: len(rest)]))
    return _together(runs)


def expand(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """Make the mask of a seed."""
    return drawn(call, inputs[0].view(torch.int32), outputs[0])


def drawn(call: Call, key: Tensor, mask: Tensor) -> Run:
    """Write the mask of a key of two int32, which is read in each run.

    Its four parts are operands of their own: written as slices of one, the compiler would buffer the whole mask. What
    they are longer than the shortest, three elements at most, is not compiled: that would take a minute instead of
    seconds.
    """
    target, p = _line(mask), _p(call)
    count = part_length(target.numel())
    parts = [target[place * count : (place + 1) * count] for place in range(DRAWS)]
    shared = min(len(part) for part in parts)

    def draw(key: Tensor, counter: Tensor, parts: Sequence[Tensor]) -> None:
        for keeps, part in zip(drawn_keeps(key, counter, p), parts, strict=True):
            ones = torch.where(keeps, 1.0, 0.0)[: len(part)].to(part.dtype)
            part.copy_(ones if part.dtype == torch.uint8 else ones * (1 / (1 - p)))

    def body(key: Tensor, *parts: Tensor) -> tuple[()]:
        draw(key, torch.arange(shared, dtype=torch.int32, device=key.device), parts)
        return ()

    runs: list[Run] = []
    if shared:
        operands = [key, *(part[:shared] for part in parts)]
        with config.patch(realize_opcount_threshold=KEPT_CALLS) if key.device.type == "cpu" else nullcontext():
            compiled = _compiled(call, body, operands)
        runs.append(lambda: compiled(list(operands)))
    if shared < count:
        rest = [part[shared:] for part in parts]
        counter = torch.arange(shared, count, dtype=torch.int32, device=key.device)
        runs.append(lambda: draw(key, counter, rest))
    return _together(runs)


def _compiled(call: Call, body: Callable[..., tuple[()]], operands: Sequence[Tensor]) -> Callable[[list[Tensor]], Any]:
    """Compile a loop over rows; masks of other axes and orders with as many elements share it."""
    rows = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in operands)
    return compiled_for(
        f"{call.candidate.kernel} {body.__name__} p={dict(call.subgraph.nodes[0].attributes).get('p')}: {rows}",
        body,
        operands,
    )


def _line(tensor: Tensor) -> Tensor:
    """View a dense tensor as one row in memory order, booleans as bytes."""
    line = in_memory_order(tensor)[0].view(-1)
    return line.view(torch.uint8) if line.dtype == torch.bool else line


def _p(call: Call) -> float:
    return float(dict(call.subgraph.nodes[0].attributes)["p"])


def _together(runs: Sequence[Run]) -> Run:
    if len(runs) == 1:
        return runs[0]

    def run() -> None:
        for each in runs:
            each()

    return run


def _to_bytes(raw: Tensor, ones: Tensor) -> tuple[()]:
    """Write 0 for 0 and 1 for the scale, which is never below 1."""
    ones.copy_(raw.clamp(max=1).to(torch.uint8))
    return ()


def _signs(raw: Tensor, ones: Tensor) -> tuple[()]:
    """Write 1 where ReLU's gradient lets through what arrives, as the framework does: also behind NaN."""
    ones.copy_(torch.where(raw <= 0, 0.0, 1.0).to(torch.uint8))
    return ()


def _quantized(raw: Tensor, numbers: Tensor, scales: Tensor) -> tuple[()]:
    found, steps = quantized(raw if raw.dtype == torch.float64 else raw.float())
    numbers.copy_(found)
    scales.copy_(steps)
    return ()


def _dequantized(numbers: Tensor, scales: Tensor, raw: Tensor) -> tuple[()]:
    raw.copy_(numbers * scales[:, None])
    return ()


def _to_bits(eights: Tensor, bits: Tensor) -> tuple[()]:
    bits.copy_(((eights * GATHER) >> (WORD - BITS)) & 0xFF)
    return ()


def _from_bits(words: Tensor, eights: Tensor) -> tuple[()]:
    """Write each of a word's eight bytes as eight elements: bit i in every byte, kept in byte i, then made 0 or 1."""
    spread = (((words[:, None] >> (torch.arange(BITS, device=words.device) * BITS)) & 0xFF) * SPREAD) & DIAGONAL
    eights.copy_(((((spread & BELOW) + BELOW) | spread) >> (BITS - 1)) & LOWEST)
    return ()


def _scaled(p: float) -> Callable[[Tensor, Tensor], tuple[()]]:
    def body(ones: Tensor, raw: Tensor) -> tuple[()]:
        raw.copy_(ones.to(raw.dtype) * (1 / (1 - p)))
        return ()

    return body


def _scaled_bits(p: float) -> Callable[[Tensor, Tensor], tuple[()]]:
    def body(bits: Tensor, raw: Tensor) -> tuple[()]:
        ones = (bits[:, None] >> torch.arange(BITS, dtype=torch.int32, device=bits.device)) & 1
        raw.copy_(ones.to(raw.dtype) * (1 / (1 - p)))
        return ()

    return body
