"""Layout and algorithm autotuner for transformer training.

configuration = autotuner.tune("bert-encoder:tiny")
layer = autotuner.apply(layer, configuration)

layer = autotuner.apply(layer, server="http://127.0.0.1:8000", extents={"b": 8, "l": 128})
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotuner.api import apply as apply
    from autotuner.api import check as check
    from autotuner.api import load_configuration as load_configuration
    from autotuner.api import restore as restore
    from autotuner.api import save_configuration as save_configuration
    from autotuner.api import summary as summary
    from autotuner.api import tune as tune
    from autotuner.client import Client as Client

__all__ = ["Client", "apply", "check", "load_configuration", "restore", "save_configuration", "summary", "tune"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("autotuner.client" if name == "Client" else "autotuner.api"), name)
    raise AttributeError(f"autotuner has no {name!r}; it offers {', '.join(__all__)}")
