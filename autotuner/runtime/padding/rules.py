"""Models that a few tokens cannot tell about: what padding changes in them shows at other lengths, or over time."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

ROTARY = ("dynamic", "longrope")
"""Rotary positions whose frequencies depend on the longest position of a batch, by their names in transformers."""


def refused(model: nn.Module) -> str | None:
    """Say why batches of a model are not padded, as its modules and its configuration tell, or None."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"{type(module).__name__} takes its mean over all rows and columns, padding included"
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            if module.max_norm is not None:
                return "an embedding with max_norm scales the row of the padding token, too"
            if module.scale_grad_by_freq or module.sparse:
                return "gradients of an embedding depend on which tokens a batch has, padding included"
    for name, value in _settings(config_of(model)):
        if name in ("rope_type", "type") and isinstance(value, str) and any(each in value for each in ROTARY):
            return f"its rotary positions ({value}) depend on the length of the batch"
        if name == "attention_type" and value == "block_sparse":
            return "its blocks of attention depend on the length of the batch"
        if name == "expert_capacity" and value is not None:
            return "its experts have a capacity, which padding takes a part of"
    return None


def config_of(model: nn.Module) -> Any:
    """Return the configuration of a model of transformers; None of any other."""
    return getattr(_original(model), "config", None)


def padding_token(model: nn.Module) -> int:
    """Return the number of the token that stands for padding, as a model's configuration has it; 0 where it has none.

    Some models take positions, or the end of a sequence, from where this token is.
    """
    config = config_of(model)
    found = getattr(config.get_text_config() if hasattr(config, "get_text_config") else config, "pad_token_id", None)
    words = getattr(_words(model), "weight", None)
    count = 1 << 31 if words is None else int(words.shape[0])
    return found if isinstance(found, int) and 0 <= found < count else 0


def _words(model: nn.Module) -> Any:
    """Return the embedding of words of a model of transformers; None where it has none, and for any other model."""
    embedding = getattr(_original(model), "get_input_embeddings", None)
    try:
        return None if embedding is None else embedding()
    except NotImplementedError:  # transformers raises it for models that embed no words
        return None


def leaves_out_ignored(model: nn.Module) -> bool:
    """Say whether a model's own loss leaves out labels of -100, as those of transformers do."""
    return hasattr(_original(model), "loss_function") and config_of(model) is not None


def _original(model: nn.Module) -> Any:
    """Return the module that torch.compile has wrapped, or the model itself."""
    return getattr(model, "_orig_mod", model)


def free(device: torch.device) -> None:
    """Give memory that nothing is in back to a device."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def _settings(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a configuration, those within values among them."""
    waiting = [config.to_dict()] if hasattr(config, "to_dict") else []
    while waiting:
        for name, value in waiting.pop().items():
            yield name, value
            if isinstance(value, Mapping):
                waiting.append(value)
