"""Numbers, as people write them: in an option's value, and in a YAML file."""

import json
import re
from math import isfinite

import yaml

from autotuner.ir.records import Scalar


class Loader(yaml.SafeLoader):
    """YAML in which 1e-12 is a number, as in YAML 1.2; to version 1.1, which PyYAML reads, it is a text."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def read_value(text: str) -> Scalar:
    """Return the value that a text stands for: true or false, a number, or a text, which may be quoted as in JSON."""
    try:
        value = json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except (ValueError, RecursionError):
        value = _number(text)
    return value if isinstance(value, str | int | float | bool) else text


def _number(text: str) -> Scalar:
    """Return a number that JSON has no such form for, as `.5`, `+1` and `1.`, or the text."""
    try:
        number = float(text)
    except ValueError:
        return text
    return number if isfinite(number) else text
