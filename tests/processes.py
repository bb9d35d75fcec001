"""Processes that train one model together, in tests."""

import gc
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from tests.stack import in_one_piece

IMPORTED = [
    "tests.processes", "torch._inductor.compile_fx", "torch.distributed.fsdp", "transformers", "autotuner.runtime",
]  # fmt: skip
"""This module, and those that take seconds to import."""

gc.set_threshold(100_000, 50, 100)  # as in the process of the tests


def spawn(run: Callable[..., None], arguments: tuple[Any, ...], count: int, *, join: bool = True) -> Any:
    """Run a function of a rank and arguments in processes, as torch's `spawn` does; without `join`, return its context.

    They are forks of one process of this run, which has imported what takes long, and nothing else. Their environment
    is that of the test. On a host with a GPU, which forks could not use, each imports for itself.
    """
    multiprocessing.set_forkserver_preload(IMPORTED)
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    given = (run, dict(os.environ), *arguments)
    return start_processes(_run, given, count, join=join, start_method=method)  # type: ignore[no-untyped-call]


def _run(rank: int, run: Callable[..., None], environment: dict[str, str], *arguments: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    in_one_piece(run, rank, *arguments)
