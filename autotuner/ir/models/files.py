"""Finding and reading of model files."""

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from autotuner.errors import ModelError
from autotuner.ir.models.model import Model, ModelFile
from autotuner.ir.models.schema import parse_definition
from autotuner.ir.models.values import Loader
from autotuner.ir.records import Scalar


def search_spaces_dir() -> Path:
    """Return the directory of search spaces: beside the package in a source checkout, inside it once installed."""
    package = Path(__file__).resolve().parents[2]
    for found in (package.parent / "search_spaces", package / "search_spaces"):
        if (found / "models").is_dir():
            return found
    raise ModelError(f"no search_spaces directory beside or inside {package}; install the package again")


def known_models() -> dict[str, Path]:
    """Return the path of each model file by the model's name."""
    return {path.stem.replace("_", "-"): path for path in sorted((search_spaces_dir() / "models").glob("*.yaml"))}


def parse_reference(reference: str) -> tuple[str, str | None]:
    """Split "bert-encoder:tiny" into name (or path) and preset; without a colon there is no preset.

    Raises:
        ModelError: the name or the preset is empty.
    """
    name, colon, preset = reference.partition(":")
    if not name or bool(colon) != bool(preset):
        raise ModelError(f'{reference!r} is no model: write "name", "name:preset" or "path.yaml:preset"')
    return name, preset or None


def load_model(name_or_path: str) -> ModelFile:
    """Read a model file.

    Args:
        name_or_path: a known name like "bert-encoder", or the path of a YAML file.

    Raises:
        ModelError: no such name or file, or its content breaks a rule.
    """
    if name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
    else:
        known = known_models()
        if name_or_path not in known:
            raise ModelError(f"no model {name_or_path!r}; known: {', '.join(known)}; or give the path of a .yaml file")
        path = known[name_or_path]
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {no_yaml(error)}") from None
    origin = str(path) if path == Path(name_or_path) else f"model {name_or_path!r}"
    return ModelFile(origin, parse_definition(content, origin))


def named_model(
    reference: str,
    *,
    extents: Mapping[str, int] | None = None,
    options: Mapping[str, Scalar] | None = None,
    dtype: str | None = None,
) -> Model:
    """Return the model that a reference such as "bert-encoder:tiny" names, with some of its values replaced.

    Raises:
        ModelError: no such model, preset, axis or option, or a value that is not valid.
    """
    name, preset = parse_reference(reference)
    return load_model(name).instantiate(preset, extents=extents or {}, options=options or {}, dtype=dtype)


def no_yaml(error: Exception) -> str:
    """Say in one line what is wrong with a text that is no YAML, and where."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{place}no valid YAML: {' '.join(problem.split())}"


class StrictLoader(Loader):
    """YAML in which a key that occurs twice is an error; the plain loader silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)
