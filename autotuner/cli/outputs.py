"""Files that a command is to write, checked before it does anything that takes time."""

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from autotuner.errors import InputError
from autotuner.files import check_writable


def check_output(path: Path | None, *given: str | Path | None) -> None:
    """Check that a file can be written, and that it is none of those that the command reads.

    Args:
        path: what is to be written; None for nothing.
        given: what the command was given to read: a path, a model file with its preset, a database.

    Raises:
        InputError: it cannot be written, or it is read.
    """
    if path is None:
        return
    for text in given:
        if text is not None and any(_same(path, file) for file in _files(str(text))):
            raise InputError(f"{path}: this file is given to be read ({text}); name another one to write")
    check_writable(path)


def _files(text: str) -> Iterator[str]:
    """Yield the files that a text may name."""
    yield os.path.expanduser(unquote(text.removeprefix("sqlite:///")) if text.startswith("sqlite:///") else text)
    yield text.rpartition(":")[0]


def _same(path: Path, file: str) -> bool:
    try:
        return bool(file) and (os.path.realpath(path) == os.path.realpath(file) or os.path.samefile(path, file))
    except OSError:
        return False  # one of the two is not there
