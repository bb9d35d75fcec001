"""Recordings: measurements of common layers that come with the package, a packed SQLite file for each device."""

import lzma
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).resolve().parent.parent / "recordings"
ENDING = ".sqlite.xz"


def recordings() -> list[Path]:
    """Return the files, in the order of their names, which are those of their devices."""
    return sorted(FOLDER.glob(f"*{ENDING}"))


@contextmanager
def unpacked(recording: Path) -> Iterator[str]:
    """Unpack a recording for a while, and return the name of an SQLite file.

    Raises:
        OSError: there is no room for it.
        lzma.LZMAError: the file is damaged.
    """
    with TemporaryDirectory(prefix="autotuner-") as folder:
        file = Path(folder) / recording.name.removesuffix(".xz")
        with lzma.open(recording) as packed, file.open("wb") as plain:
            shutil.copyfileobj(packed, plain)
        yield str(file)
