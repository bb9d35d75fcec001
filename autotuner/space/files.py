"""Search space files, `search_spaces/kernels/*.yaml`: which kernels to try, and what of each."""

from math import prod
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from autotuner.errors import DeviceError, SpaceError
from autotuner.kernels import KERNELS
from autotuner.models import search_spaces_dir
from autotuner.models.values import Loader
from autotuner.records import Scalar

ENUMERATED = 32
TRIALS = 40
COMBINATIONS_MAX = 65_536


class KernelEntry(BaseModel):
    """What to try of one kernel.

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
        """How many combinations the lists make, those included that the kernel refuses."""
        return _combinations(self.params)

    @property
    def sampled(self) -> bool:
        """Whether there may be operands for which not all combinations are tried."""
        return self.combinations > self.enumerate_up_to


def _combinations(params: dict[str, list[Scalar]]) -> int:
    return prod(len(values) for values in params.values())


class SpaceFile(BaseModel):
    """A file of `search_spaces/kernels/`."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[1]
    device_type: str
    max_operators: int = Field(default=8, ge=1)
    kernels: dict[str, KernelEntry]
    conversions: list[str]


def load_space(path: Path) -> SpaceFile:
    """Read a search space.

    Raises:
        SpaceError: the file is missing or malformed, or names a kernel that is not registered.
    """
    try:
        space = SpaceFile.model_validate(yaml.load(path.read_text(), Loader))
    except FileNotFoundError as error:
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml")))
        raise SpaceError(f"{path}: no such search space; in that folder: {known or 'none'}") from error
    except (yaml.YAMLError, ValidationError, OSError, ValueError, RecursionError) as error:
        raise SpaceError(f"{path}: {error}") from error
    unknown = [name for name in (*space.kernels, *space.conversions) if name not in KERNELS]
    if unknown:
        known = ", ".join(sorted(kernel.name for kernel in KERNELS))
        raise SpaceError(f"{path}: no kernel {unknown[0]!r}; known: {known}")
    return space


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
