"""A model file, and a model: the file's content with extents, options and dtype chosen."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Annotated, Any

from pydantic import Field

from autotuner.errors import ModelError
from autotuner.ir.graph import Graph
from autotuner.ir.kinds import ELEMENT_BYTES
from autotuner.ir.models.bounds import EXTENT_MAX, shown
from autotuner.ir.models.build import build_graph
from autotuner.ir.models.schema import Definition, parse_definition
from autotuner.ir.records import Scalar, digest

FRAMEWORK_LAYERS = ("bert-encoder", "gpt-block")
"""Models that `nn.TransformerEncoderLayer` computes where `h` is `n` times `p`."""

CAPTURED = "captured-"
"""Beginning of the names of captured regions."""

TOKEN_AXES = ("batch", "position in the sequence")
"""Words that a model file has for the two axes of its tokens."""


@dataclass(frozen=True)
class Model:
    """One forward graph, self-contained.

    Args:
        name: of the model file.
        preset: whose extents were the start, if any.
        extents: elements along each of the file's axes.
        options: a value for each of the file's options.
        dtype: of inputs and parameters that do not name their own; the types of what operators make follow.
        definition: the content of the model file, as JSON.
    """

    name: str
    preset: str | None
    extents: Mapping[str, Annotated[int, Field(ge=1, strict=True)]]
    options: Mapping[str, Scalar]
    dtype: str
    definition: Mapping[str, Any]

    @property
    def reference(self) -> str:
        """The text that `parse_reference` reads."""
        return f"{self.name}:{self.preset}" if self.preset else self.name

    @cached_property
    def family(self) -> str:
        """Key of what models share that differ in extents and dtype only: operators, tensors and options."""
        parts = ("inputs", "parameters", "operators", "outputs")
        return digest([{part: self.definition.get(part) for part in parts}, sorted(self.options.items())])

    @property
    def has_framework_layer(self) -> bool:
        """True where the framework has a layer that computes the same, `nn.TransformerEncoderLayer`."""
        extents = self.extents
        return self.name in FRAMEWORK_LAYERS and extents["h"] == extents["n"] * extents["p"]

    @property
    def is_captured(self) -> bool:
        """True for a region that was read from a module: what it is faster than is that module."""
        return self.name.startswith(CAPTURED)

    @property
    def tokens(self) -> int | None:
        """Tokens of a training step, where the words of two axes say so; None where they do not."""
        axes = [axis for axis, words in self.definition["axes"].items() if words in TOKEN_AXES]
        words = {self.definition["axes"][axis] for axis in axes}
        return prod(self.extents[axis] for axis in axes) if len(axes) == len(words) == len(TOKEN_AXES) else None

    def graph(self) -> Graph:
        """Return the forward graph."""
        return self._graph

    @cached_property
    def _graph(self) -> Graph:
        origin = f"model {self.name!r}"
        definition = parse_definition(self.definition, origin)
        return build_graph(definition, name=self.reference, extents=self.extents, options=self.options,
                           dtype=self.dtype, origin=origin)  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "preset": self.preset,
            "extents": dict(self.extents),
            "options": dict(self.options),
            "dtype": self.dtype,
            "definition": dict(self.definition),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Model":
        """Read what `to_json` wrote, and check it as if it were a model file.

        Raises:
            ModelError: a key is missing or unknown, or a value is not valid.
        """
        keys = ("name", "preset", "extents", "options", "dtype", "definition")
        if not isinstance(value, Mapping) or set(value) != set(keys):
            given = sorted(value) if isinstance(value, Mapping) else value
            raise ModelError(f"a saved model has the keys {', '.join(keys)}, not {given!r}")
        file = ModelFile(f"saved model {value['name']!r}", parse_definition(value["definition"], "saved model"))
        if value["name"] != file.definition.name or not isinstance(value["preset"], str | None):
            raise ModelError(
                f"saved model {value['name']!r} with preset {value['preset']!r}: its definition is named "
                f"{file.definition.name!r}, and a preset is a name or null"
            )
        for key in ("extents", "options"):
            if not isinstance(value[key], Mapping):
                raise ModelError(f"{file.origin}: {key} must be a mapping, not {value[key]!r}")
        model = file.instantiate(extents=value["extents"], options=value["options"], dtype=value["dtype"])
        return replace(model, preset=value["preset"])


@dataclass(frozen=True)
class ModelFile:
    """The checked content of a model file, and where it came from."""

    origin: str
    definition: Definition

    def instantiate(
        self,
        preset: str | None = None,
        extents: Mapping[str, int] | None = None,
        options: Mapping[str, Any] | None = None,
        dtype: str | None = None,
    ) -> Model:
        """Choose extents, options and dtype, and check that the graph can be built.

        Args:
            preset: whose extents to start from.
            extents: elements along axes, instead of the preset's.
            options: instead of the file's defaults.
            dtype: instead of the file's.

        Raises:
            ModelError: an unknown or invalid value, an axis without extent, or operators that do not fit together;
                the message names the file and what would be valid.
        """
        dtype = self.definition.dtype if dtype is None else dtype
        if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
            raise ModelError(f"{self.origin}: no dtype {dtype!r}; known: {', '.join(ELEMENT_BYTES)}")
        model = Model(
            name=self.definition.name,
            preset=preset,
            extents=self._extents(preset, extents or {}),
            options=self._options(options or {}),
            dtype=dtype,
            definition=self.definition.model_dump(mode="json", exclude_none=True),
        )
        build_graph(self.definition, name=model.reference, extents=model.extents, options=model.options, dtype=dtype,
                    origin=self.origin)  # fmt: skip
        return model

    def _extents(self, preset: str | None, extents: Mapping[str, int]) -> dict[str, int]:
        presets, axes = self.definition.presets, self.definition.axes
        if preset is not None and preset not in presets:
            raise ModelError(f"{self.origin}: no preset {preset!r}; known: {', '.join(presets) or 'none'}")
        for axis, extent in extents.items():
            if axis not in axes:
                raise ModelError(f"{self.origin}: no axis {axis!r}; known: {_described(axes)}")
            if type(extent) is not int or not 1 <= extent <= EXTENT_MAX:
                given = shown(extent) if type(extent) is int else repr(extent)
                raise ModelError(
                    f"{self.origin}: axis {axis!r} has extent {given}; it must be an integer above 0, and at most "
                    f"{EXTENT_MAX}"
                )
        chosen = {**(presets[preset] if preset else {}), **extents}
        missing = {axis: text for axis, text in axes.items() if axis not in chosen}
        if missing:
            first = [o.name for o in self.definition.operators if any(axis in o.spec for axis in missing)][:1]
            needed = f"operator {first[0]!r} is the first that needs one; " if first else ""
            raise ModelError(
                f"{self.origin}: axis without extent: {_described(missing)}; {needed}give an extent for each, "
                f"or a preset: {', '.join(presets) or 'the file has none'}"
            )
        return {axis: chosen[axis] for axis in axes}

    def _options(self, given: Mapping[str, Any]) -> dict[str, Scalar]:
        known = self.definition.options
        for name, value in given.items():
            if name not in known:
                raise ModelError(f"{self.origin}: no option {name!r}; known: {', '.join(known) or 'none'}")
            if known[name].accepted(value) is None:
                raise ModelError(f"{self.origin}: option {name!r} is {value!r}; it must be {known[name].valid}")
        values = {name: option.accepted(given.get(name, option.default)) for name, option in known.items()}
        return {name: value for name, value in values.items() if value is not None}


def _described(axes: Mapping[str, str]) -> str:
    return ", ".join(f"{axis} ({text})" for axis, text in axes.items())
