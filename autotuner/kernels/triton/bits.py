"""Masks of bits inside Triton kernels: words drawn at random, and their bits brought to the elements of a tile.

A word holds the bits of 32 elements, element i in bit i. It is drawn at once: the binary digits of the share that is
kept, from the lowest 1 upwards, join one fresh random word each, a 1 by OR and a 0 by AND.

Source:
    Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011): Philox4x32 with 7 rounds.
"""

import triton
import triton.language as tl


@triton.jit
def drawn_words(seed, place, KEPT: tl.constexpr):
    """Return words of random bits, each 1 with probability KEPT / 65536.

    Args:
        seed: the key of the generator, 64 bits.
        place: int32, the counter of each word.
    """
    counter = place.to(tl.uint32)
    zero = tl.zeros(place.shape, tl.uint32)
    words = zero
    for call in tl.static_range(4):
        if KEPT % (1 << (4 * call + 4)) != 0:
            first, second, third, fourth = tl.philox(seed, counter, zero + call, zero, zero, 7)
            words = _joined(words, first, KEPT, 4 * call)
            words = _joined(words, second, KEPT, 4 * call + 1)
            words = _joined(words, third, KEPT, 4 * call + 2)
            words = _joined(words, fourth, KEPT, 4 * call + 3)
    return words.to(tl.int32, bitcast=True)


@triton.jit
def _joined(words, fresh, KEPT: tl.constexpr, DIGIT: tl.constexpr):
    if KEPT % (1 << (DIGIT + 1)) != 0:
        words = words | fresh if (KEPT >> DIGIT) % 2 == 1 else words & fresh
    return words


@triton.jit
def words_row_by_row(words, row_starts, ok, first, words_per_row, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Return for each element of a tile (rows, columns) the word that holds its bit: one load for each word of a row.

    Args:
        words: of the whole mask.
        row_starts: number of the first word of each row of the tile.
        ok: the rows that exist.
        first: number in its row of the first word of the tile.
        words_per_row: of the mask.
        COLUMNS: of the tile, a multiple of 32.
        EVEN: the tile lies inside of the mask.
    """
    column = tl.arange(0, COLUMNS)
    at = words + row_starts + first
    found = tl.load(at)[:, None] if EVEN else tl.load(at, mask=ok, other=0)[:, None]
    for i in tl.static_range(1, COLUMNS // 32):
        more = tl.load(at + i) if EVEN else tl.load(at + i, mask=ok & (first + i < words_per_row), other=0)
        found = tl.where((column // 32 == i)[None, :], more[:, None], found)
    return found


@triton.jit
def words_at_once(
    words, row_starts, ok, first, words_per_row, COLUMNS: tl.constexpr, EVEN: tl.constexpr, SWAPPED: tl.constexpr
):
    """Return the same, of a tile of 64 or 128 columns: all words in one load, and then taken apart.

    Args:
        SWAPPED: the tile's axes are (columns, rows).
    """
    part = first + tl.arange(0, COLUMNS // 32)
    at = words + row_starts[:, None] + part[None, :]
    found = tl.load(at) if EVEN else tl.load(at, mask=ok[:, None] & (part < words_per_row)[None, :], other=0)
    return spread_words(found, row_starts.shape[0], COLUMNS, SWAPPED)


@triton.jit
def spread_words(found, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SWAPPED: tl.constexpr):
    """Return for each element of a tile of 64 or 128 columns the word that holds its bit.

    Args:
        found: the words, (rows, columns / 32).
        SWAPPED: the tile's axes are (columns, rows).
    """
    column = tl.arange(0, COLUMNS)
    if COLUMNS == 64:
        first_word, second_word = tl.split(found)
        spread = _chosen(column < 32, first_word, second_word, SWAPPED)
    else:
        even, odd = tl.split(tl.reshape(found, (ROWS, 2, 2)))
        first_word, third_word = tl.split(even)
        second_word, fourth_word = tl.split(odd)
        half = _chosen(column < 32, first_word, second_word, SWAPPED)
        rest = _chosen(column < 96, third_word, fourth_word, SWAPPED)
        spread = tl.where((column < 64)[:, None] if SWAPPED else (column < 64)[None, :], half, rest)
    return spread


@triton.jit
def _chosen(of_columns, word, other, SWAPPED: tl.constexpr):
    if SWAPPED:
        spread = tl.where(of_columns[:, None], word[None, :], other[None, :])
    else:
        spread = tl.where(of_columns[None, :], word[:, None], other[:, None])
    return spread


@triton.jit
def kept_along_rows(words, COLUMNS: tl.constexpr):
    """Return which elements of a tile (rows, columns) have bit 1.

    Lanes of a warp hold columns that differ in bits 1 and 2 of their number: a shift by these is the same for all
    elements of a thread, and the bit to test is then known at compile time.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    return ((words >> (column & 6)) & (1 << (column & 25))) != 0


@triton.jit
def kept_along_columns(words, COLUMNS: tl.constexpr):
    """Return which elements of a tile (columns, rows) have bit 1; a thread's columns differ in bit 3."""
    column = tl.arange(0, COLUMNS)[:, None]
    return ((words >> (column & 23)) & (1 << (column & 8))) != 0


@triton.jit
def dropped_halves(weights, words, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BFLOAT16: tl.constexpr):
    """Return float32 weights (rows, columns) as 16-bit numbers, 0 where their bit is 0: two by two, by PTX.

    A shift brings each element's bit to the top of a byte; `prmt` spreads it over the 16 bits of its result.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    raised = words << (7 - (column & 7))
    chosen = (column >> 3) % 4 * 0x1111 + 0xCC88 + tl.zeros((ROWS, COLUMNS), tl.int32)
    if BFLOAT16:
        halves = tl.inline_asm_elementwise(
            """{ .reg .b32 both, low, high, mask;
            and.b32 low, $5, 0xff; and.b32 high, $6, 0xff00; or.b32 low, low, high;
            prmt.b32 mask, $3, $4, low;
            cvt.rn.bf16x2.f32 both, $2, $1;
            and.b32 $0, both, mask; }""",
            "=r,r,r,r,r,r,r", [weights, raised, chosen], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        halves = tl.inline_asm_elementwise(
            """{ .reg .b32 both, low, high, mask;
            and.b32 low, $5, 0xff; and.b32 high, $6, 0xff00; or.b32 low, low, high;
            prmt.b32 mask, $3, $4, low;
            cvt.rn.f16x2.f32 both, $2, $1;
            and.b32 $0, both, mask; }""",
            "=r,r,r,r,r,r,r", [weights, raised, chosen], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return halves
