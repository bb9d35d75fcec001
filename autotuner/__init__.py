"""Layout and algorithm autotuner for transformer training.

>>> import autotuner
>>> from torch import nn
>>> layer = nn.TransformerEncoderLayer(128, 4, 512, activation="gelu", batch_first=True)
>>> configuration = autotuner.load_configuration("tiny.json")  # or autotuner.tune("bert-encoder:tiny"), which measures
>>> layer = autotuner.apply(layer, configuration)
>>> isinstance(layer, nn.TransformerEncoderLayer)
True

With a service: `autotuner.apply(layer, server="http://127.0.0.1:8000", extents={"b": 8, "l": 128})`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotuner.api import apply as apply
    from autotuner.api import check as check
    from autotuner.api import load_configuration as load_configuration
    from autotuner.api import module as module
    from autotuner.api import optimize as optimize
    from autotuner.api import restore as restore
    from autotuner.api import save_configuration as save_configuration
    from autotuner.api import summary as summary
    from autotuner.api.clipping import clip_in_buckets as clip_in_buckets
    from autotuner.api.comparing import compare_batches as compare_batches
    from autotuner.api.layer_to_layer import layer_to_layer as layer_to_layer
    from autotuner.api.length_batches import batches as batches
    from autotuner.api.packed_batches import packed_batches as packed_batches
    from autotuner.api.packing import packed as packed
    from autotuner.api.packing import packed_attention as packed_attention
    from autotuner.api.packing import packed_bounds as packed_bounds
    from autotuner.api.survey import regions as regions
    from autotuner.api.training import training_step as training_step
    from autotuner.api.tuning import tune as tune
    from autotuner.api.ways import compare_ways as compare_ways
    from autotuner.errors import AutotunerError as AutotunerError
    from autotuner.errors import TunedWarning as TunedWarning
    from autotuner.plan.configuration import Configuration as Configuration
    from autotuner.server.client import Client as Client
    from autotuner.settings import Limits as Limits
    from autotuner.settings import TuneOptions as TuneOptions
    from autotuner.tuner import Progress as Progress

# Where each name is: imported when it is first used.
_PLACES = {
    "AutotunerError": "errors",
    "Client": "server.client",
    "Configuration": "plan.configuration",
    "Limits": "settings",
    "Progress": "tuner",
    "TuneOptions": "settings",
    "TunedWarning": "errors",
    "apply": "api",
    "batches": "api.length_batches",
    "check": "api",
    "clip_in_buckets": "api.clipping",
    "compare_batches": "api.comparing",
    "compare_ways": "api.ways",
    "layer_to_layer": "api.layer_to_layer",
    "load_configuration": "api",
    "module": "api",
    "optimize": "api",
    "packed": "api.packing",
    "packed_attention": "api.packing",
    "packed_batches": "api.packed_batches",
    "packed_bounds": "api.packing",
    "regions": "api.survey",
    "restore": "api",
    "save_configuration": "api",
    "summary": "api",
    "training_step": "api.training",
    "tune": "api.tuning",
}

__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        from autotuner.extras import needed_for

        with needed_for(f"autotuner.{name}"):
            return getattr(importlib.import_module(f"autotuner.{_PLACES[name]}"), name)
    raise AttributeError(f"autotuner has no {name!r}; it offers {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
