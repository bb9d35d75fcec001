"""Scores of attention: what models do to them before the softmax, as operators that kernels of attention know."""

from collections.abc import Iterator

import torch
from torch import Tensor

from autotuner.ir.program import parse_program
from autotuner.ir.scores import Hidden, pieces_of, soft_cap
from autotuner.runtime.capture.additive import additive
from autotuner.runtime.capture.attention_masks import masks_of_attention
from autotuner.runtime.capture.axes import UnknownError, extent, whole
from autotuner.runtime.capture.known_masks import Band
from autotuner.runtime.capture.program import Computed, Operation, TensorValue, View, source_of
from autotuner.runtime.capture.program_text import written
from autotuner.runtime.capture.reader import Reader, as_numbers, learned, memory


def masked(reader: Reader, scores: View, mask: View, *, written_out: bool = False) -> tuple[View, View | None]:
    """Append the sum of scores and a mask, and return it, and which queries see a key; see `masks_of_attention`.

    None: all of them do, or nothing says so.
    """
    if learned(mask):
        return reader.mapped("bias", scores, reader.united(scores.dims, reader.typed(mask))), None
    band = _taken(scores, reader.masks.band(mask, True))
    if band is not None:
        return within(reader, scores, band), None
    beside = None if written_out else _taken(scores, reader.masks.band_beside_keys(mask))
    if beside is not None:
        return _with_keys_hidden(reader, scores, mask, beside)
    added, sees = masks_of_attention(mask, extent(whole(scores.dims[-2])), written_out=written_out)
    return reader.mapped("mask", scores, reader.united(scores.dims, added)), sees


def _with_keys_hidden(reader: Reader, scores: View, mask: View, band: Band) -> tuple[View, View | None]:
    """Append a mask of keys and the hiding of what is outside of a band; return scores, and which queries see a key."""
    added, sees = masks_of_attention(mask, extent(whole(scores.dims[-2])), in_band=True)
    return within(reader, reader.mapped("mask", scores, reader.united(scores.dims, added)), band), sees


def biased_where_shown(reader: Reader, scores: View, bias: View, shown: View, other: float) -> View:
    """Append the sum of scores and a bias, and of the lowest number of their type where a mask is false.

    The bias is of all sequences, the mask of all heads: their choice, of each sequence and head, is never in memory.
    A bias that nothing is learned of is 0 everywhere.

    Raises:
        UnknownError: the number is another one.
    """
    if other != torch.finfo(getattr(torch, scores.dtype)).min:
        raise UnknownError(f"a choice of {other:g}, which is not the lowest number of {scores.dtype}")
    if learned(bias):
        scores = reader.mapped("bias", scores, reader.united(scores.dims, reader.typed(bias)))
    if reader.masks.hides_nothing(shown):
        return scores
    band = _taken(scores, reader.masks.band(shown, True))
    if band is not None:
        return within(reader, scores, band)
    source = source_of(shown.tensor)
    mask = View(TensorValue(source.dims, "bool", source.node, computed=Computed(additive, (source,), ())), shown.dims)
    return reader.mapped("mask", scores, reader.united(scores.dims, mask))


def causal(reader: Reader, scores: View) -> View:
    """Append the hiding of what comes later; raises as `within`."""
    return within(reader, scores, Band(extent(whole(scores.dims[-1])), 0))


def within(reader: Reader, scores: View, band: Band) -> View:
    """Append the hiding of what is outside of a band, if anything is.

    Raises:
        UnknownError: queries and keys are not the same positions, of one axis each.
    """
    if extent(whole(scores.dims[-2])) != extent(whole(scores.dims[-1])):
        raise UnknownError("a causal mask, or a window, over other queries than keys")
    queries, keys = (whole(dim) for dim in scores.dims[-2:])
    if len(queries) != 1 or len(keys) != 1:
        raise UnknownError("a causal mask, or a window, over positions of several axes")
    axes = {"query_axis": queries[0], "key_axis": keys[0]}
    if min(band.before, band.after) >= keys[0].extent - 1:
        return scores
    if band.is_causal(keys[0].extent):
        return reader.mapped("causal_mask", scores, **axes)
    return reader.mapped("window_mask", scores, **axes, before=band.before, after=band.after)


def _taken(scores: View, band: Band | None) -> Band | None:
    """Return a band if scores have it as an operator.

    They do not where queries and keys are not the same positions, of one axis each, or where a window is beside a bias,
    which no kernel of attention takes: it stays a mask.
    """
    queries, keys = (whole(dim) for dim in scores.dims[-2:])
    if band is None or len(queries) != 1 or len(keys) != 1 or queries[0].extent != keys[0].extent:
        return None
    if band.is_causal(keys[0].extent):
        return band
    return None if any(made.kind == "bias" for made in _behind_a_product(scores)) else band


def with_mask(reader: Reader, scores: View, *, beside_sinks: bool = False) -> View:
    """Return scores by a mask where they are a sum with a buffer, or an input, that no gradient is wanted of.

    So models add what hides the windows of an image from each other behind a learned bias. The sum stays, as in
    `in_pieces`. What a model computes is left as it is: whether that is learned cannot be told where nothing is. But a
    constant that hides what is outside of a band is known.

    Args:
        beside_sinks: a query that sees no key weighs none. So what hides keys by the lowest number hides them as well
            as any other.
    """
    made = scores.tensor.made_by
    if made is None or made.kind != "bias" or scores.fixed:
        return scores
    before, given = (operand.view for operand in made.inputs)
    shown = _shown(reader, given) if beside_sinks else None
    band = None if shown is None else _taken(before, reader.masks.band_beside_keys(shown))
    is_known = (
        band is not None
        or _is_given(given)
        or (not given.fixed and not learned(given) and reader.masks.band(given, True))
    )
    if not is_known or not is_of_activations(before) or min(len(scores.dims), len(given.dims)) < 2:
        return scores
    mark = reader.mark()
    try:
        if shown is not None and band is not None:
            found, _ = _with_keys_hidden(reader, before, shown, band)
        else:
            found, _ = masked(reader, before, given, written_out=True)
    except UnknownError:
        reader.take_back(mark)
        return scores
    return View(found.tensor, scores.dims)


def _shown(reader: Reader, mask: View) -> View | None:
    """Return where a mask is 0, if a boolean tensor says so, and it is the lowest number elsewhere."""
    node = reader.masks.condition(mask)
    return None if node is None else View(TensorValue(mask.tensor.dims, "bool", node), mask.dims, mask.fixed)


def _is_given(addend: View) -> bool:
    """Say whether a tensor is a buffer of the model or an input of it, whole, and needs no gradient."""
    source = source_of(addend.tensor)
    from_outside = source.node is not None and source.node.op in ("placeholder", "get_attr")
    return from_outside and not source.parameter and not addend.fixed and not learned(addend)


def is_of_activations(scores: View) -> bool:
    """Say whether scores are a product of what two operators make, or come in, and not of a weight."""
    *_, made = (None, *_behind_a_product(scores))
    if made is None or made.kind != "contraction":
        return False
    return not any(source_of(operand.view.tensor).parameter for operand in made.inputs)


def _behind_a_product(scores: View) -> Iterator[Operation]:
    """Yield what makes scores of a product, the last first, and what the first of these reads: that product, if any."""
    made = scores.tensor.made_by
    while made is not None:
        yield made
        if made.kind not in _ON_SCORES:
            return
        made = made.inputs[0].view.tensor.made_by


_ON_SCORES = ("scale", "bias", "mask", "causal_mask", "window_mask", "pointwise", "cast")


def in_pieces(reader: Reader, scores: View) -> View:
    """Return scores by a scale, a soft cap and a mask, where one expression was all of these.

    The expression stays; where nobody else reads it, it is part of no region.
    """
    made = scores.tensor.made_by
    if made is None or made.kind != "pointwise" or scores.fixed:
        return scores
    product = made.inputs[0].view
    if product.tensor.made_by is None or product.tensor.made_by.kind not in ("contraction", "scale", "bias", "mask"):
        return scores
    program = parse_program(str(made.attributes["program"]))
    pieces = pieces_of(program)
    if pieces is None or pieces.factor <= 0:
        return scores
    mark = reader.mark()
    try:
        found = product
        if pieces.factor != 1.0:
            found = reader.mapped("scale", found, factor=pieces.factor)
        if pieces.cap is not None:
            text = written(soft_cap(pieces.cap, scores.dtype), "pointwise")
            (capped,) = reader.make("pointwise", (found,), [memory(found)], {"program": text}, scores.dtype)
            assert capped.made_by is not None
            capped.made_by.places = made.places
            found = View(capped, found.dims)
        for number in pieces.added:
            given = made.inputs[number].view
            if given.dtype == "bool":
                raise UnknownError("a boolean tensor that is added as numbers")
            found, _ = masked(reader, found, given, written_out=True)
        for each in pieces.hidden:
            found = _hidden(reader, found, made.inputs[each.number].view, each)
    except UnknownError:
        reader.take_back(mark)
        return scores
    return View(found.tensor, scores.dims)


def _hidden(reader: Reader, scores: View, given: View, says: Hidden) -> View:
    """Append the hiding of keys by a boolean tensor from outside, which a program reads as numbers.

    Raises:
        UnknownError: it is no such tensor, or only a part of one; or a query that sees no key would weigh all alike,
            which kernels of attention do not.
    """
    numbers = given.tensor.computed
    if numbers is None or numbers.function is not as_numbers or given.fixed:
        raise UnknownError("what hides keys is no boolean tensor from outside")
    (source,) = numbers.of
    band = _taken(scores, reader.masks.band(View(source, given.dims), says.where_zero))
    if band is not None:
        return within(reader, scores, band)
    if not says.by_infinity:
        raise UnknownError("keys are hidden by a number")
    by = Computed(hiding, (source,), (says.where_zero,))
    mask = View(TensorValue(source.dims, "bool", source.node, computed=by), given.dims)
    return reader.mapped("mask", scores, reader.united(scores.dims, mask))


def hiding(mask: Tensor, where_zero: bool, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores: -inf where a boolean tensor hides a key, and 0 elsewhere."""
    hides = ~mask if where_zero else mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(hides, float("-inf"))
