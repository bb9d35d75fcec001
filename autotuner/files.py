"""Files that are written whole or not at all."""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autotuner.errors import InputError


def write(path: Path, text: str) -> None:
    """Write a text file, whole or not at all.

    Raises:
        InputError: it cannot be written.
    """
    with _beside(path) as part:
        part.write_text(text, encoding="utf-8")
        if part != path:
            os.replace(part, path)


def write_parts(path: Path, parts: Iterable[str]) -> None:
    """Write a text file part by part, whole or not at all; raises as `write`."""
    with _beside(path) as part:
        with part.open("w", encoding="utf-8") as file:
            for text in parts:
                file.write(text)
        if part != path:
            os.replace(part, path)


def check_writable(path: Path) -> None:
    """Check that a file can be written, before there is anything to write.

    Raises:
        InputError: it cannot be written.
    """
    with _beside(path) as part, part.open("a"):
        pass


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yield the path of a new file in the same folder, which is gone afterwards; of a device or a pipe, its own."""
    part = path
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.is_file() or not path.exists():
            part = path.with_name(f"{path.name}.{os.getpid()}.part")
        yield part
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); name a file in a folder that can") from error
    finally:
        if part != path:
            with suppress(OSError):
                part.unlink()
