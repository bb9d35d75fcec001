"""`autotuner.packed`: a model of transformers that takes batches without padding; bounds for models of one's own."""

from typing import Any

from torch import Tensor

from autotuner.errors import InputError
from autotuner.runtime.packing.batches import Packer
from autotuner.runtime.packing.bounds import bounds_of, visible
from autotuner.runtime.packing.check import check
from autotuner.runtime.packing.interface import (
    NAME,
    add_hooks,
    attention_of,
    register,
    remove_hooks,
    set_attention,
)
from autotuner.runtime.packing.operator import packed_attention as packed_attention
from autotuner.runtime.packing.own_modules import reason_unset
from autotuner.runtime.packing.relative_bias import register_hooks


def packed(model: Any, *, multiple: int = 128, tokens: int | None = None, shifted_labels: bool | None = None) -> Packer:
    """Have a model of transformers take packed batches: sequences one behind the other, without padding.

    The model's attention becomes one that keeps each token to its own sequence; all else sees tokens alone. The model
    stays what it is, takes padded batches as before, and is tuned, compiled, trained and saved as before. A few tokens
    are run to check that the model makes of each what it makes of it in a padded batch.

    Args:
        model: of transformers, with attention that can be set or is known here (docs/training.md has a table), one
            output for each token, and without an encoder beside its decoder. It is changed in place.
        multiple: the number of tokens of a batch is filled up to one of this number, so that there are few shapes.
        tokens: the number of tokens of each batch, filled up to it; None for as few as there are.
        shifted_labels: whether the loss of a token is that of the next one's label, as in causal models, so that the
            first label of a sequence belongs to no token of it; None to find out by the model's own loss.

    Returns:
        A function that packs: give it a padded batch, or use it as a collate function for examples. See `Packer`.

    Raises:
        InputError: the model cannot run packed; the message says why.
        ExtraError: transformers is not installed.
    """
    if multiple < 1 or (tokens is not None and tokens < 1):
        raise InputError(f"multiple and tokens are 1 or more; given: {multiple}, {tokens}")
    if not hasattr(model, "set_attn_implementation") or not hasattr(model, "config"):
        raise InputError(f"packed takes a model of transformers; given: {type(model).__name__}")
    config = model.config
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise InputError(f"{type(model).__name__} has attention to an encoder, which packed does not take")
    if any(hasattr(config, name) for name in ("vision_config", "audio_config", "image_token_id")):
        raise InputError(f"{type(model).__name__} has other inputs than text, which packed does not take")
    if getattr(config, "output_router_logits", False):
        raise InputError(
            f"{type(model).__name__} has output_router_logits in its configuration: its loss that balances experts "
            "reads attention_mask as one of padding; set it to False"
        )
    register()
    before = attention_of(model)
    packer = Packer(multiple, tokens, shifted_labels, first=_first_position(model))
    try:
        register_hooks(model)
        set_attention(model, NAME)
        if attention_of(model).get("") != NAME:
            raise InputError(reason_unset(model))
        found = check(model, before, packer.first)
    except BaseException:
        unpacked_again(model, before)
        raise
    add_hooks(model)
    if shifted_labels is None:
        packer.shifted = found
    elif found is not None and found != shifted_labels:
        raise InputError(f"the loss of {type(model).__name__} says shifted_labels={found}; given: {shifted_labels}")
    return packer


def unpacked_again(model: Any, before: dict[str, Any]) -> None:
    """Have a model be as before `packed`, with the attention that it had."""
    if before.get("", NAME) == NAME:
        return
    set_attention(model, before)
    remove_hooks(model)


def packed_bounds(positions: Tensor, *, causal: bool = False, window: int | None = None) -> Tensor:
    """Return for each packed token the first token that it sees, and the one behind the last, for `packed_attention`.

    Nothing waits for the device, and shapes follow from shapes alone.

    Args:
        positions: (tokens,), in the sequence: one begins wherever a position is not that of the token before, plus 1.
        causal: no token sees one behind it.
        window: so many tokens are seen at most, the own one among them; to both sides where it is not causal.

    Returns:
        (tokens, 2) of int32, on the same device.

    >>> import torch
    >>> packed_bounds(torch.tensor([0, 1, 2, 0, 1]), causal=True).tolist()
    [[0, 1], [0, 2], [0, 3], [3, 4], [3, 5]]
    """
    if positions.dim() != 1:
        raise InputError(f"positions are (tokens,); given: {list(positions.shape)}")
    if window is not None and window < 1:
        raise InputError(f"a window is 1 or more; given: {window}")
    return visible(bounds_of(positions), causal, window)


def _first_position(model: Any) -> int:
    """Return the position of a first token: models like RoBERTa begin behind the number of their padding."""
    makers = ("create_position_ids_from_input_ids", "create_position_ids_from_inputs_embeds")
    for module in model.modules():
        if any(hasattr(module, name) for name in makers) and getattr(module, "padding_idx", None) is not None:
            return int(module.padding_idx) + 1
    return 0
