"""Values of bodies and queries: texts, numbers and names with their bounds."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from autotuner.ir.models.bounds import EXTENT_MAX

PAGE = 50
PAGE_MAX = 1000
AXIS = r"^[a-zA-Z]$"
INTEGER_MAX = 2**63 - 1
"""The largest integer that the database stores."""

BYTES_MAX = 2**50
"""Above what any device has, and exact as a float, as some readers of JSON take every number."""

OPTIONS_MAX = 64
TEXT_MAX = 1000
"""Characters of any text in a body, above what a model file needs."""

JobStateName = Literal["queued", "running", "finished", "failed", "cancelled", "interrupted"]
RoleName = Literal["reader", "submitter", "admin"]
MatchName = Literal["exact", "doubtful", "near_device", "near_shape", "none"]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Axis = Annotated[str, Field(pattern=AXIS)]
Text = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]+$")]
Identifier = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Key = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _integer(value: Any) -> Any:
    """Read an integer of a body: 980.0 is one, as JSON Schema has it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digits(value: Any) -> Any:
    """Read an integer of a URL or a header: digits alone, which is less than Python takes for one."""
    if not isinstance(value, str):
        return value
    if not (value.isascii() and value.isdigit()) or len(value) > 20:
        raise PydanticCustomError("whole_number", "Input should be a whole number in decimal digits, within 64 bits")
    return int(value)


def _truth(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if value in ("true", "false"):
        return bool(value == "true")
    raise PydanticCustomError("true_or_false", "Input should be true or false")


Integer = BeforeValidator(_integer)
Digits = BeforeValidator(_digits)
Truth = BeforeValidator(_truth)
Extent = Annotated[int, Field(ge=1, le=EXTENT_MAX, strict=True), Integer]
Id = Annotated[int, Field(ge=1, le=INTEGER_MAX), Digits]
Cursor = Annotated[int, Field(ge=0, le=INTEGER_MAX), Digits]
PageLimit = Annotated[int, Field(ge=1, le=PAGE_MAX), Digits]


PRIORITY_MAX = 100
"""Of a job that an admin submits; a submitter's is at most 0."""

KEY_PATTERN = r"^[\x21-\x7e]{1,200}$"
"""Of an idempotency key: visible ASCII, with or without quotes around it."""
