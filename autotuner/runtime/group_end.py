"""The end of torch's process groups: what holds parts of them is closed before.

A CUDA graph with collectives of NCCL holds its communicator, and `destroy_process_group` waits for ever for graphs that
are still there.
"""

import atexit
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol
from weakref import WeakSet

from torch import distributed
from torch.distributed import distributed_c10d


class Closable(Protocol):
    """Holds parts of a process group."""

    def close(self) -> None:
        """Let them go."""


_HOLDERS: "WeakSet[Closable]" = WeakSet()


def close_before_groups(holder: Closable) -> None:
    """Have something be closed before process groups are destroyed, and before the process ends."""
    if not _HOLDERS:
        _stand_before_the_end()
    _HOLDERS.add(holder)


def close_all() -> None:
    for holder in list(_HOLDERS):
        holder.close()


class _FirstToEnd:
    """Stands among torch's communicators, which end before the groups do, however that was called."""

    finalize = staticmethod(close_all)


def _stand_before_the_end() -> None:
    comms = getattr(getattr(distributed_c10d, "_world", None), "comms", None)
    if isinstance(comms, list) and not any(isinstance(each, _FirstToEnd) for each in comms):
        comms.append(_FirstToEnd())
    for module in (distributed, distributed_c10d):  # for one group, and for a torch without these
        ends: Callable[..., Any] = module.destroy_process_group
        if not hasattr(ends, "closes_before"):
            module.destroy_process_group = _closing(ends)  # type: ignore[attr-defined]
    atexit.unregister(close_all)
    atexit.register(close_all)


def _closing(ends: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(ends)
    def closing(*arguments: Any, **keywords: Any) -> Any:
        close_all()
        return ends(*arguments, **keywords)

    closing.closes_before = True  # type: ignore[attr-defined]
    return closing
