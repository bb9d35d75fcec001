"""What several commands read from their options."""

import pytest

from autotuner.cli.options import given_bytes
from autotuner.errors import InputError


@pytest.mark.parametrize(
    ("text", "count"),
    [("512", 512), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("2kB", 2000), ("1G", 10**9), ("1TiB", 1 << 40),
     ("64kib", 64 << 10), ("7B", 7)],
)  # fmt: skip
def test_a_number_of_bytes_is_read_with_its_unit(text: str, count: int) -> None:
    assert given_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1PiB", "1 2", "0x10"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="write a number of bytes, or one with a unit, such as 512MiB"):
        given_bytes(text)


def test_no_budget_is_none() -> None:
    assert given_bytes(None) is None
