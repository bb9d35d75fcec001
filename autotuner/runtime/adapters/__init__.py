"""Framework modules that a configuration can stand in for, one file each; a framework is imported only once a module
of it is given."""

import importlib
from typing import Any

from torch import nn

from autotuner.errors import ConfigurationError
from autotuner.runtime.adapter import Adapter
from autotuner.runtime.module import TunedModule

# By the module's class: the file of its drop-in and adapter.
_FILES = {
    "torch.nn.modules.transformer.TransformerEncoderLayer": "encoder_layer",
    "transformers.models.bert.modeling_bert.BertLayer": "bert_layer",
    "transformers.models.camembert.modeling_camembert.CamembertLayer": "bert_layer",
    "transformers.models.electra.modeling_electra.ElectraLayer": "bert_layer",
    "transformers.models.roberta.modeling_roberta.RobertaLayer": "bert_layer",
    "transformers.models.xlm_roberta.modeling_xlm_roberta.XLMRobertaLayer": "bert_layer",
}
NAMED_MAX = 6


def adapter_for(module: nn.Module) -> Adapter:
    """Return the adapter of a module's class, tuned or not; raises as `drop_in_for`."""
    return drop_in_for(module).adapter


def drop_in_for(module: nn.Module) -> type[TunedModule]:
    """Return the class of the tuned modules that stand in for a module, tuned or not.

    Raises:
        ConfigurationError: no adapter for this class; the message says what to tune instead.
    """
    if not is_known(module):
        raise ConfigurationError(_instead(module))
    kind = module.original if isinstance(module, TunedModule) else type(module)
    found: type[TunedModule] = importlib.import_module(f"{__name__}.{_FILES[_name(kind)]}").DROP_INS[kind]
    return found


def is_known(module: nn.Module) -> bool:
    """Say whether a module's class, tuned or not, has an adapter."""
    return _name(module.original if isinstance(module, TunedModule) else type(module)) in _FILES


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _instead(module: Any) -> str:
    """Say that a module cannot be tuned, and what about it can."""
    name = _name(type(module))
    known = next((base for base in type(module).__mro__ if _name(base) in _FILES), None)
    if known is not None:
        return (
            f"{name} cannot be tuned: it is a subclass of {known.__name__} and may compute something else; give a "
            f"{known.__name__} itself"
        )
    inside = module.named_modules() if isinstance(module, nn.Module) else ()
    layers = [(path, type(part).__name__) for path, part in inside if _name(type(part)) in _FILES]
    if not layers:
        return f"{name} cannot be tuned; these can: {', '.join(_FILES)}"
    paths, kinds = ", ".join(path for path, _ in layers[:NAMED_MAX]), ", ".join(sorted({kind for _, kind in layers}))
    more = f" and {len(layers) - NAMED_MAX} more" if layers[NAMED_MAX:] else ""
    return (
        f"{name} cannot be tuned as a whole; its layers can: {paths}{more} ({kinds}). Tune "
        f"one, module.get_submodule({layers[0][0]!r}), and put what apply returns for each layer in its place"
    )
