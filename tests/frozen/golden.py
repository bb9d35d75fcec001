"""Golden values: what was written at one commit, under tests/data/frozen, and in what a value differs from it.

Tests of this folder pin what a change of the code's structure must leave as it is: keys, files and messages that others
hold, and answers to recorded sweeps. Where one of them is meant to change, the golden value is written anew by hand, in
the commit that changes it, with the function `write` of the test's module:

    python -c 'from tests.frozen.test_keys import write; write()'

and the difference that `git diff` shows of a text file, or the test before of a packed one, is read and told in the
commit. `database.sqlite.gz` and the configurations stand for files of earlier versions: they are kept as they are, and
one of a later version is added beside them. All are of the sweeps in `RECORDINGS`, which stay as they are too.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.recorded import LARGE, Recording

FROZEN = Path(__file__).resolve().parents[1] / "data" / "frozen"
TINY = Recording(FROZEN / "recording_tiny.json.gz")
RECORDINGS = {"tiny": TINY, "large": LARGE}
TOLERANCE = 1e-9
SHOWN = 20


def golden(name: str) -> Any:
    """Return the value of a golden file, JSON as text or packed."""
    data = (FROZEN / name).read_bytes()
    return json.loads(gzip.decompress(data) if name.endswith(".gz") else data)


def write_golden(name: str, value: Any) -> None:
    """Write a golden file: as text, to be read in a difference, or packed where its name ends in .gz.

    Keys stay in their order: on that of a model's tensors depends the key of its graph.
    """
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    FROZEN.mkdir(exist_ok=True)
    (FROZEN / name).write_bytes(gzip.compress(text.encode(), mtime=0) if name.endswith(".gz") else text.encode())


def assert_same(found: Any, expected: Any) -> None:
    """Fail where a value, as JSON, is not the golden one; numbers may differ by `TOLERANCE`, relatively."""
    different = list(differences(json.loads(json.dumps(found)), expected))
    more = f"\n... and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
    assert not different, "\n".join(different[:SHOWN]) + more


def differences(found: Any, expected: Any, path: str = "$") -> Iterator[str]:
    """Yield a line for each place in which two JSON values differ."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for name in sorted(found.keys() | expected.keys()):
            if name not in found:
                yield f"{path}.{name} is missing, and was {_short(expected[name])}"
            elif name not in expected:
                yield f"{path}.{name} is new: {_short(found[name])}"
            else:
                yield from differences(found[name], expected[name], f"{path}.{name}")
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif not _same(found, expected):
        yield f"{path} is {_short(found)}, and was {_short(expected)}"


def _same(found: Any, expected: Any) -> bool:
    if isinstance(found, float) and isinstance(expected, float):
        return abs(found - expected) <= TOLERANCE * max(abs(found), abs(expected))
    return type(found) is type(expected) and bool(found == expected)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
