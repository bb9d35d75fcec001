"""JSON documents of dataclasses: pydantic reads, checks and describes them by the types of their fields."""

from collections.abc import Sequence
from dataclasses import fields
from reprlib import repr as short
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, Strict, TypeAdapter, ValidationError, model_validator
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticCustomError


def _whole(value: Any) -> Any:
    """Return an integer for a whole number such as 2.0: JSON tells the two apart no more than JSON Schema."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Number = Annotated[float, Strict()]
IntegerOrNumber = Annotated[int, Strict()] | Number
Us = Annotated[float, Field(ge=0, strict=True)]
Share = Us
Positive = Annotated[float, Field(gt=0, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True), BeforeValidator(_whole)]
AtLeastOne = Annotated[int, Field(ge=1, strict=True), BeforeValidator(_whole)]
Flag = Annotated[bool, Strict()]
Key = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

MAY_BE_ABSENT = ("default_is_marked", "doubts", "leaner", "numerics", "overlap", "slowdown", "switching_us")
"""Fields that files of earlier versions lack."""

T = TypeVar("T")


class Document:
    """A dataclass that is read from JSON, where no field may be absent, whatever its default."""

    @model_validator(mode="before")
    @classmethod
    def _check_all_there(cls, value: Any) -> Any:
        names = (field.name for field in fields(cls))  # type: ignore[arg-type]
        return with_all([name for name in names if name not in MAY_BE_ABSENT], value)


def with_all(names: Sequence[str], value: Any) -> Any:
    """Return a value that has these names if it is a mapping."""
    absent = [name for name in names if isinstance(value, dict) and name not in value]
    if absent:
        raise PydanticCustomError("absent", f"{absent[0]!r} is required")
    return value


class _Schema(GenerateJsonSchema):
    def field_is_required(self, field: Any, total: bool) -> bool:
        is_of_dataclass = "name" in field
        return field["name"] not in MAY_BE_ABSENT if is_of_dataclass else super().field_is_required(field, total)


def schema_of(adapter: TypeAdapter[Any]) -> dict[str, Any]:
    """Return the JSON Schema of a document."""
    return {"$schema": GenerateJsonSchema.schema_dialect, **adapter.json_schema(schema_generator=_Schema)}


def read(adapter: TypeAdapter[T], value: Any) -> T:
    """Return the dataclass that a document describes.

    Raises:
        ValueError: it describes none; the message tells the place, what is given there, and what would be valid.
    """
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ValueError(_sentence(error, value)) from None


def _sentence(error: ValidationError, value: Any) -> str:
    """Return what is wrong at the first place where something is."""
    found: dict[str, list[str]] = {}
    for each in error.errors(include_url=False):
        place, given, words = "$", value, each["msg"]
        for part in each["loc"]:
            try:
                given = given[part]
            except (KeyError, IndexError, TypeError):
                break  # what is absent; or the name of a type, one of several that would be valid
            place += f"[{part}]" if isinstance(part, int) else f".{part}"
        if each["type"] == "missing":
            name = each["loc"][-1]
            words = f"{name!r} is required" if isinstance(name, str) else f"there is no item {name}"
        if each["type"] == "unexpected_keyword_argument":
            words = "no field of this name is known"
        found.setdefault(place if each["type"] == "absent" else f"{place}: {short(given)}", []).append(words)
    place, sentences = next(iter(found.items()))
    return f"{place}: {' or '.join(sentences)}"
