"""Recorded times in place of measuring, which takes minutes; every Python of a document's clone imports this first.

The measurer of a tuning run is replaced when its module is imported, and nothing else is: what is enumerated, solved,
stored, served and trained is real.
"""

import gc
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PLACE = "autotuner.server.worker.attending"
UNEXPLAINED = "DOCUMENT_UNEXPLAINED"
"""Set for documents in which nobody reads why a plan is not better, which takes a fifth of a tuning."""


class Patched(importlib.abc.Loader):
    """Loads the module, and then replaces in it what measures."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        from tests.docs.recorded_times import NoneAhead, NotBegun, recorded, recorded_with, untimed

        places = {
            "_measurer": recorded, "_timed_apart": untimed, "StartedAhead": NoneAhead, "measurer_ahead": NotBegun,
            "measuring_with": recorded_with,
        }  # fmt: skip
        assert places.keys() <= vars(module).keys(), "what measures has another name now"
        vars(module).update(places)
        if UNEXPLAINED in os.environ:
            from autotuner.tuner.policy import TuningPolicy

            module.tune_attended.__kwdefaults__["policy"] = TuningPolicy(explaining_s=0.0)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != PLACE:
            return None
        sys.meta_path.remove(self)
        found = find_spec(fullname)
        assert found is not None
        found.loader = Patched(found.loader)
        return found


sys.meta_path.insert(0, Finder())
gc.set_threshold(100_000, 50, 100)  # as in the process of the tests
