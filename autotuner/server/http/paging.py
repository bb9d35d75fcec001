"""Pages of lists: as many items as were asked for, and as many bytes as one answer may have."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

PAGE_BYTES = 2**22
READ_AT_ONCE = 50
"""A page is read in parts of so many items, so that no more of them than that are in memory beside it."""


class Item(Protocol):
    """One row of a page."""

    @property
    def id(self) -> int: ...

    def model_dump_json(self) -> str: ...


T = TypeVar("T", bound=Item)


def page_of(
    read: Callable[[int, int | None], Sequence[T]], limit: int, start: int | None
) -> tuple[list[T], int | None]:
    """Return the items of a page, one at least where there is any, and the id after which the next one goes on.

    Args:
        read: returns so many items after the one with an id, fewer where there are no more.
        limit: of the number of items.
        start: the id after which the page begins; None for the beginning.
    """
    items: list[T] = []
    taken_bytes = 0
    while True:
        wanted = min(READ_AT_ONCE, limit + 1 - len(items))
        found = read(wanted, start)
        for item in found:
            taken_bytes += len(item.model_dump_json())
            if items and (len(items) == limit or taken_bytes > PAGE_BYTES):
                return items, items[-1].id
            items.append(item)
            start = item.id
        if len(found) < wanted:
            return items, None
