"""Triton's programs of Adam and AdamW: all parameters of a group in one pass over memory, in chunks.

Source:
    Kingma, Ba: Adam: A Method for Stochastic Optimization (2015), algorithm 1.
    Loshchilov, Hutter: Decoupled Weight Decay Regularization (2019), algorithm 2.
"""

import triton
import triton.language as tl

TABLES = ["table", "places", "factors", "rates", "corrections"]
"""Read number by number: programs are the same wherever a part of a table begins."""


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=[TABLES[0], *TABLES[3:]])
def counted_steps(table, rates, corrections, count, log_one, log_two, LANES: tl.constexpr):
    """Count a step of each parameter, and write what its moments are corrected by.

    Args:
        table: int64, a row of six for each parameter; the last is the address of its counter, float32.
        rates: the learning rate, float32.
        corrections: float32, two for each parameter: the rate over 1 - beta1^t, and the root of 1 - beta2^t.
        count: of parameters.
        log_one: the natural logarithm of beta1, and `log_two` of beta2: powers of numbers near 1 need their digits.
    """
    number = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = number < count
    counter = tl.load(table + 6 * number + 5, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(counter, mask=inside, other=0.0) + 1.0
    tl.store(counter, step, mask=inside)
    rate = tl.load(rates).to(tl.float64)
    wide = step.to(tl.float64)
    first = rate / (1.0 - tl.exp(wide * log_one))
    second = tl.sqrt(1.0 - tl.exp(wide * log_two))
    tl.store(corrections + 2 * number, first.to(tl.float32), mask=inside)
    tl.store(corrections + 2 * number + 1, second.to(tl.float32), mask=inside)


@triton.jit
def _at(table, place, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + place).to(tl.pointer_type(TYPE))
    if ALIGNED:  # said of the pointer, not of the number: else elements are read one by one
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _moved(
    value, gradient, first, second, factor, rate, size, root, beta_one, rest_one, beta_two, rest_two, epsilon, decay,
    SCALED: tl.constexpr, DECOUPLED: tl.constexpr,
):  # fmt: skip
    """Return a value and its two moments behind a step, in float32."""
    if SCALED:  # rounded, as gradients that are scaled where they are
        gradient = (gradient.to(tl.float32) * factor).to(gradient.dtype)
    value, gradient = value.to(tl.float32), gradient.to(tl.float32)
    if DECOUPLED:
        value -= rate * decay * value
    else:
        gradient += decay * value
    first = beta_one * first.to(tl.float32) + rest_one * gradient
    second = beta_two * second.to(tl.float32) + rest_two * gradient * gradient
    return value - size * first / (tl.sqrt(second) / root + epsilon), first, second


@triton.jit(do_not_specialize_on_alignment=TABLES)
def moved_chunk(
    table, places, factors, rates, corrections, beta_one, rest_one, beta_two, rest_two, epsilon, decay,
    TYPE: tl.constexpr, SCALED: tl.constexpr, DECOUPLED: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Move a chunk of a parameter and of its moments by its gradient; all arithmetic is in float32.

    Args:
        table: int64, for each parameter the addresses of its values, gradient, first and second moment, of one type
            and in one order in memory, the number of its elements, and the address of its counter.
        places: int32, for each program its parameter and its chunk of that.
        factors: what gradients are multiplied by first, float32; read where they are SCALED.
        rates, corrections: as in `counted_steps`.
        rest_one: 1 - beta1, and `rest_two` 1 - beta2.
        DECOUPLED: the decay is AdamW's.
        ALIGNED: all addresses are multiples of 16.
    """
    program = tl.program_id(0)
    parameter = tl.load(places + 2 * program)
    begin = tl.load(places + 2 * program + 1).to(tl.int64) * CHUNK
    row = table + 6 * parameter
    count = tl.load(row + 4)
    values, gradients = _at(row, 0, TYPE, ALIGNED), _at(row, 1, TYPE, ALIGNED)
    firsts, seconds = _at(row, 2, TYPE, ALIGNED), _at(row, 3, TYPE, ALIGNED)
    factor = tl.load(factors) if SCALED else 1.0
    rate = tl.load(rates)
    size, root = tl.load(corrections + 2 * parameter), tl.load(corrections + 2 * parameter + 1)
    at = begin + tl.arange(0, CHUNK)
    if begin + CHUNK <= count:  # without masks, neighbours are read and written together
        value, first, second = _moved(
            tl.load(values + at), tl.load(gradients + at), tl.load(firsts + at), tl.load(seconds + at),
            factor, rate, size, root, beta_one, rest_one, beta_two, rest_two, epsilon, decay, SCALED, DECOUPLED,
        )  # fmt: skip
        tl.store(firsts + at, first.to(TYPE))
        tl.store(seconds + at, second.to(TYPE))
        tl.store(values + at, value.to(TYPE))
    else:
        inside = at < count
        value, first, second = _moved(
            tl.load(values + at, mask=inside, other=0.0), tl.load(gradients + at, mask=inside, other=0.0),
            tl.load(firsts + at, mask=inside, other=0.0), tl.load(seconds + at, mask=inside, other=0.0),
            factor, rate, size, root, beta_one, rest_one, beta_two, rest_two, epsilon, decay, SCALED, DECOUPLED,
        )  # fmt: skip
        tl.store(firsts + at, first.to(TYPE), mask=inside)
        tl.store(seconds + at, second.to(TYPE), mask=inside)
        tl.store(values + at, value.to(TYPE), mask=inside)
