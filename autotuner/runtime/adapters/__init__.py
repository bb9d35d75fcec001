"""Framework modules that a configuration can stand in for, one file each; a framework is imported only once a module
of it is given."""

import importlib

from torch import nn

from autotuner.errors import ConfigurationError
from autotuner.runtime.adapters.adapter import Adapter, Description

__all__ = ["Adapter", "Description", "adapter_for"]

# By the module's class: where its adapter is.
_ADAPTERS = {
    "torch.nn.modules.transformer.TransformerEncoderLayer": "encoder_layer",
    "transformers.models.bert.modeling_bert.BertLayer": "bert_layer",
}


def adapter_for(module: nn.Module) -> Adapter:
    """Return the adapter of a module's class, tuned or not.

    Raises:
        ConfigurationError: no adapter for this class; subclasses may compute something else, so they have none.
    """
    kind = getattr(type(module), "original", type(module))
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name not in _ADAPTERS:
        raise ConfigurationError(f"{name} cannot be tuned; these can: {', '.join(_ADAPTERS)}")
    found: Adapter = importlib.import_module(f"{__name__}.{_ADAPTERS[name]}").ADAPTER
    return found
