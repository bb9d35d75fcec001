"""Models: YAML files of forward operators, and the graphs that they describe."""

from autotuner.ir.models.files import known_models, load_model, named_model, parse_reference, search_spaces_dir
from autotuner.ir.models.model import Model, ModelFile
from autotuner.ir.models.values import read_value

__all__ = [
    "Model",
    "ModelFile",
    "known_models",
    "load_model",
    "named_model",
    "parse_reference",
    "read_value",
    "search_spaces_dir",
]
