"""Files that are written whole or not at all."""

import os
import threading
from pathlib import Path

import pytest

from autotuner.errors import InputError
from autotuner.files import check_writable, write


def test_a_file_is_written_and_nothing_else_is_left(tmp_path: Path) -> None:
    write(tmp_path / "page.html", "\N{GREEK SMALL LETTER MU}s")
    assert (tmp_path / "page.html").read_bytes() == b"\xce\xbcs"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    "name, reason",
    [
        ("missing/a.json", "No such file or directory"),
        (".", "Is a directory"),
        ("a" * 250, "File name too long"),
        ("old/a.json", "Not a directory"),
    ],
)
def test_what_cannot_be_written_is_named_before_and_when_it_is_tried(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "old").write_text("kept")
    for attempt in (check_writable, lambda path: write(path, "new")):
        with pytest.raises(InputError, match=rf"cannot be written \({reason}\); name a file in a folder that can"):
            attempt(tmp_path / name)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["kept"]


def test_asking_whether_a_file_can_be_written_leaves_it_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("kept")
    check_writable(tmp_path / "old")
    check_writable(tmp_path / "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old", "kept")]


def test_a_pipe_is_written_to_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write(tmp_path / "pipe", "{}")
    reader.join()
    assert (read, (tmp_path / "pipe").is_fifo()) == (["{}"], True)
