"""Content of a model file, as Pydantic models. Unknown keys are errors; nothing in the file is evaluated."""

import sys
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from autotuner.errors import ModelError
from autotuner.ir.kinds import ELEMENT_BYTES
from autotuner.ir.models.bounds import EXTENT_MAX
from autotuner.ir.records import Scalar

Axis = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z]$")]
Axes = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z]+$")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Reference = Annotated[str, StringConstraints(pattern=r"^\$[A-Za-z_][A-Za-z0-9_]*$")]
NameOrReference = Annotated[str, StringConstraints(pattern=r"^\$?[A-Za-z_][A-Za-z0-9_]*$")]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Extent = Annotated[int, Field(ge=1, le=EXTENT_MAX)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Option(_Strict):
    """A value that may be chosen: one of `choices`, or a number in `range`, its upper end excluded."""

    default: Scalar
    choices: list[Scalar] | None = None
    range: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None

    @model_validator(mode="after")
    def _check_default(self) -> Self:
        if (self.choices is None) == (self.range is None):
            raise ValueError("an option has either choices or a range")
        if self.accepted(self.default) is None:
            raise ValueError(f"the default {self.default!r} is none of its valid values: {self.valid}")
        return self

    @property
    def valid(self) -> str:
        """The valid values, for messages."""
        if self.choices is not None:
            return "one of " + ", ".join(str(choice) for choice in self.choices)
        low, high = self.range or (0.0, 0.0)
        return f"a number from {low:g} to below {high:g}"

    def accepted(self, value: Any) -> Scalar | None:
        """Return a value as this option keeps it, or None if it is not valid."""
        if self.choices is not None:
            return next((choice for choice in self.choices if type(choice) is type(value) and choice == value), None)
        low, high = self.range or (0.0, 0.0)
        number = isinstance(value, int | float) and not isinstance(value, bool) and low <= value < high
        return float(value) if number and abs(value) <= sys.float_info.max else None


class Input(_Strict):
    """A tensor that the caller gives; it is there only `when` an option is true.

    With `requires_grad: false`, no gradient of it is computed. `dtype` is the model's where it is left out.
    """

    axes: Axes
    dtype: Dtype | None = None
    when: Reference | None = None
    requires_grad: bool | None = None


class Parameter(_Strict):
    """A parameter of another dtype than the model's; the others are written as their axes alone."""

    axes: Axes
    dtype: Dtype


class InverseSqrt(_Strict):
    """A number written as data: 1 / sqrt(extent of an axis)."""

    inverse_sqrt: Axis


class OperatorEntry(_Strict):
    """One forward operator; it vanishes unless `when` is true, and its consumers then read its first input."""

    name: Name
    kind: NameOrReference
    spec: str
    inputs: list[Name]
    outputs: Annotated[list[Name], Field(min_length=1)]
    attributes: dict[Name, Scalar | InverseSqrt] = {}
    when: Reference | None = None


class Definition(_Strict):
    """The content of a model file.

    `dtype` is that of inputs and parameters which do not name another one; the types of what operators make follow.
    """

    version: Literal[1]
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    dtype: str = "float32"
    axes: dict[Axis, str]
    options: dict[Name, Option] = {}
    presets: dict[str, dict[Axis, Extent]] = {}
    inputs: dict[Name, Input]
    parameters: dict[Name, Axes | Parameter] = {}
    operators: Annotated[list[OperatorEntry], Field(min_length=1)]
    outputs: Annotated[list[Name], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_references(self) -> Self:
        if self.dtype not in ELEMENT_BYTES:
            raise ValueError(f"no dtype {self.dtype!r}; known: {', '.join(ELEMENT_BYTES)}")
        for preset, extents in self.presets.items():
            foreign = [axis for axis in extents if axis not in self.axes]
            if foreign:
                raise ValueError(f"preset {preset!r} has axis {foreign[0]!r}; the model's are {', '.join(self.axes)}")
        given = {name: axes_of(entry) for name, entry in (*self.inputs.items(), *self.parameters.items())}
        for tensor, axes in given.items():
            foreign = [axis for axis in axes if axis not in self.axes]
            if foreign:
                raise ValueError(f"tensor {tensor!r} has axis {foreign[0]!r}; the model's are {', '.join(self.axes)}")
            if len(set(axes)) != len(axes):
                raise ValueError(f"tensor {tensor!r} has an axis twice in {axes!r}")
        both = sorted(set(self.inputs) & set(self.parameters))
        if both:
            raise ValueError(f"tensor {both[0]!r} is an input and a parameter; it can be one of them")
        return self


def axes_of(entry: Input | Parameter | str) -> str:
    """Return the axes of an input or a parameter."""
    return entry if isinstance(entry, str) else entry.axes


def parse_definition(content: Any, origin: str) -> Definition:
    """Return the checked content of a model file.

    Raises:
        ModelError: it breaks a rule; the message names file, operator and key.
    """
    try:
        return Definition.model_validate(content)
    except ValidationError as error:
        problems = dict.fromkeys(_sentence(problem["loc"], problem["msg"], content) for problem in error.errors())
        raise ModelError(f"{origin}: {'; '.join(problems)}") from None


def _sentence(location: tuple[int | str, ...], message: str, content: Any) -> str:
    message = message.removeprefix("Value error, ")
    place = [str(part) for part in location]
    if location[:1] == ("operators",) and len(location) > 1:
        entry = content["operators"][location[1]]
        name = entry.get("name", location[1]) if isinstance(entry, dict) else location[1]
        place = [f"operator {name!r}", *place[2:]]
        if place[1:2] == ["attributes"] and len(place) > 3:
            # One sentence for all alternatives of an attribute's value.
            place, message = place[:3], "it must be a number, a text, true, false, $option or {inverse_sqrt: axis}"
    return f"{': '.join(place)}: {message}" if place else message
