"""Modules of models whose attention is not transformers' to set, or that read a mask in another way."""

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import nn

from autotuner.errors import InputError

_HERE, _THERE = "autotuner.runtime.packing", "transformers.models"
_OF_FAMILIES = {
    "bloom": "bloom", "codegen": "gpt_like", "esm": "esm", "falcon": "falcon", "gpt_neo": "gpt_like",
    "gpt_neox_japanese": "gpt_like", "gptj": "gpt_like", "megatron_bert": "bert_like", "mpnet": "mpnet", "mpt": "mpt",
    "rembert": "bert_like",
}  # fmt: skip
_FILES = {f"{_THERE}.{name}.modeling_{name}": f"{_HERE}.{file}" for name, file in _OF_FAMILIES.items()}
"""Modules of this package by transformers' modules.

Each has CLASSES, transformers' classes and those that take their place for packed batches; ATTENDS, which says whether
these compute attention; and a `reason_against`, if it refuses some configurations.
"""
PACKED_BY_CLASS = "BLOOM, CodeGen, Falcon, GPT-J, GPT-Neo, GPT-NeoX-Japanese, Megatron-BERT, MPNet, MPT, RemBERT"
_REASONS = {
    "deberta": "scores of DeBERTa are products with vectors of each distance",
    "deberta-v2": "scores of DeBERTa are products with vectors of each distance",
    "funnel": "scores of Funnel are products with vectors of each distance, and its layers shorten a batch",
    "xlnet": "scores of XLNet are products with vectors of each distance",
    "roformer": "RoFormer counts positions from the first token of the batch, in a table of limited length",
}


def _of_model(model: nn.Module) -> Iterator[tuple[Any, ModuleType]]:
    """Go over the modules of a model that have another class for packed batches."""
    for module in model.modules():
        name = type(module).__module__
        file = _FILES.get(name, name if name in _FILES.values() else None)
        if file is not None:
            own = importlib.import_module(file)
            if type(module) in own.CLASSES or type(module) in own.CLASSES.values():
                yield module, own


def attends(model: nn.Module) -> bool:
    """Tell whether a model has an attention of its own that has another class for packed batches."""
    return any(own.ATTENDS for _, own in _of_model(model))


def is_set(model: nn.Module) -> bool:
    """Tell whether a model's own attention keeps to bounds."""
    return any(own.ATTENDS and type(module) not in own.CLASSES for module, own in _of_model(model))


def set_packed(model: nn.Module, wanted: bool) -> None:
    """Have a model's own modules keep to bounds, or be those of transformers again.

    Raises:
        InputError: they cannot with their configuration; nothing has changed then.
    """
    found = list(_of_model(model))
    for module, own in found if wanted else ():
        reason_against = getattr(own, "reason_against", None)
        reason = reason_against(module) if reason_against is not None else None
        if reason is not None:
            raise InputError(f"{type(model).__name__} cannot run packed: {reason}")
    for module, own in found:
        classes = own.CLASSES if wanted else {packed: plain for plain, packed in own.CLASSES.items()}
        module.__class__ = classes.get(type(module), type(module))


def reason_unset(model: Any) -> str:
    """Say why a model's attention cannot be set."""
    known = _REASONS.get(getattr(model.config, "model_type", ""))
    own = known or f"it is code of its own, which packed has for {PACKED_BY_CLASS}"
    return f"{type(model).__name__} does not let its attention be set, so it cannot run packed: {own}"
