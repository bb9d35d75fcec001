"""Search space files, `search_spaces/kernels/*.yaml`: which kernels to try, and what of each."""

from math import prod
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from autotuner.errors import DeviceError, SpaceError
from autotuner.ir.models import search_spaces_dir
from autotuner.ir.models.files import StrictLoader, no_yaml
from autotuner.ir.records import Scalar
from autotuner.kernels import KERNELS

ENUMERATED = 32
TRIALS = 40
COMBINATIONS_MAX = 65_536
PROBLEMS_MAX = 5
SHOWN_CHARACTERS = 60


class KernelEntry(BaseModel):
    """Layouts and parameters to try of one kernel.

    `params` are lists that multiply out. Where the kernel admits more than `enumerate_up_to` of the combinations for
    some operands, these are not all tried: `trials` of them are, each proposed by what the earlier ones took.
    """

    model_config = ConfigDict(extra="forbid")

    layouts: Literal["all", "declared"] = "all"
    params: dict[str, list[Scalar]] = Field(default_factory=dict)
    enumerate_up_to: int = Field(default=ENUMERATED, ge=1)
    trials: int = Field(default=TRIALS, ge=1)

    @field_validator("params")
    @classmethod
    def _multiply_out(cls, params: dict[str, list[Scalar]]) -> dict[str, list[Scalar]]:
        for name, values in params.items():
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name}: {values}; list one value or more, each once")
        if (combinations := _combinations(params)) > COMBINATIONS_MAX:
            raise ValueError(f"the lists multiply out to {combinations:,}; at most {COMBINATIONS_MAX:,} are possible")
        return params

    @property
    def combinations(self) -> int:
        """The number of combinations of the lists, with those that the kernel refuses."""
        return _combinations(self.params)

    @property
    def sampled(self) -> bool:
        """True if not all combinations may be tried for some operands."""
        return self.combinations > self.enumerate_up_to


def _combinations(params: dict[str, list[Scalar]]) -> int:
    return prod(len(values) for values in params.values())


class SpaceFile(BaseModel):
    """A file of `search_spaces/kernels/`.

    Args:
        max_operators: the largest connected set given to a compiler.
        repeats: whether kernels of backward may repeat cheap operators of forward.
    """

    model_config = ConfigDict(extra="forbid")

    version: Literal[1]
    device_type: str
    max_operators: int = Field(default=8, ge=1)
    repeats: bool = True
    kernels: dict[str, KernelEntry]
    conversions: list[str]


def load_space(path: Path) -> SpaceFile:
    """Read a search space.

    Raises:
        SpaceError: the file is missing or malformed, or names a kernel that is not registered; the message says in
            which line, what is there, and what would be valid.
    """
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, StrictLoader)
        content = yaml.load(text, StrictLoader)
    except FileNotFoundError:
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml")))
        raise SpaceError(f"{path}: no such search space; in that folder: {known or 'none'}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpaceError(f"{path}: cannot be read: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpaceError(f"{path}: {no_yaml(error)}") from None
    try:
        space = SpaceFile.model_validate(content)
    except ValidationError as error:
        found = [(_place(problem["loc"]), _sentence(problem)) for problem in error.errors()]
        shown = dict.fromkeys(f"{_line(root, place)}{'.'.join(map(str, place))}{text}" for place, text in found)
        raise SpaceError(f"{path}: {'; '.join(list(shown)[:PROBLEMS_MAX])}") from None
    for place in (*(("kernels", name) for name in space.kernels), *(("conversions", n) for n in space.conversions)):
        if place[1] not in KERNELS:
            known = ", ".join(sorted(kernel.name for kernel in KERNELS))
            raise SpaceError(f"{path}: {_line(root, place)}{place[0]}: no kernel {place[1]!r}; known: {known}")
    return space


def _place(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return where a value stands in the file; of a parameter's values, without the type that it was taken for."""
    return location[:5] if location[:1] == ("kernels",) and location[2:3] == ("params",) else location


def _sentence(problem: ErrorDetails) -> str:
    """Say what is wrong at a place, to follow its keys: what is there, and what would be valid."""
    location, given, limits = problem["loc"], problem["input"], problem.get("ctx", {})
    inside = KernelEntry if location[:1] == ("kernels",) and len(location) > 1 else SpaceFile
    if problem["type"] == "extra_forbidden":
        return f": no such key; known: {', '.join(inside.model_fields)}"
    if problem["type"] == "missing":
        return " is missing: write it"
    if problem["type"] == "value_error":
        return f": {limits['error']}"
    if problem["type"] in ("model_type", "dict_type") and not location:
        return f"it is {_shown(given)}; write a mapping with the keys {', '.join(inside.model_fields)}"
    if problem["type"] == "greater_than_equal":
        return f" is {_shown(given)}; write a number of {limits['ge']} or more"
    if len(location) > 4 and location[2] == "params":
        return f" is {_shown(given)}; write a number, a text, true or false"
    valid = limits.get("expected") or _VALID.get(problem["type"].partition("_")[0], problem["msg"])
    return f" is {_shown(given)}; write {valid}"


_VALID = {"model": "a mapping", "dict": "a mapping", "list": "a list", "int": "a whole number", "string": "a text"}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _line(node: yaml.Node | None, place: tuple[int | str, ...]) -> str:
    """Return the line of a place for the start of a message, or of the last part of it that is there."""
    line = None
    for part in place:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == str(part)), None)
        elif isinstance(node, yaml.SequenceNode):
            items = [(value, value) for value in node.value]
            named = next((item for item in items if item[0].value == part), None)
            found = items[part] if isinstance(part, int) and part < len(items) else named
        else:
            found = None
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return "" if line is None else f"line {line}: "


def space_file(device_type: str, path: str | Path | None = None) -> SpaceFile:
    """Return the search space of a device type, or the one at a path.

    Raises:
        SpaceError: there is none, or it cannot be used.
        DeviceError: the file at the path is for another device type.
    """
    found = load_space(Path(path) if path else search_spaces_dir() / "kernels" / f"{device_type}.yaml")
    if found.device_type != device_type:
        raise DeviceError(f"{path}: it is for device type {found.device_type!r}, asked for is {device_type!r}")
    return found


def describe(file: SpaceFile) -> dict[str, Any]:
    """Return a search space as JSON-able data, for people and programs."""
    return {
        "device_type": file.device_type,
        "max_operators": file.max_operators,
        "repeats": file.repeats,
        "kernels": {
            name: {"covers": list(KERNELS[name].covers), "layouts": entry.layouts, **_described_params(entry)}
            for name, entry in file.kernels.items()
        },
        "conversions": file.conversions,
    }


def _described_params(entry: KernelEntry) -> dict[str, Any]:
    cells = "sampled" if entry.sampled else "enumerated"
    tried = min(entry.trials, entry.combinations) if entry.sampled else entry.combinations
    return {"params": entry.params, "cells": cells, "combinations": entry.combinations, "tried": tried}
