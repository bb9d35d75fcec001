"""Tests marked `gpu` run where a CUDA device is, those of PostgreSQL where that is; they are skipped elsewhere.

All run with an empty home, as on a new machine. What is compiled is kept in it until the end of the run, so that no
test compiles what another one has compiled, and none finds what an earlier run has left.
"""

import gc
import logging
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

HOMES = {
    "HOME": "", "TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton", "CUPY_CACHE_DIR": "cupy",
}  # fmt: skip
"""Variables that name folders of the run's home."""

FORGOTTEN = (
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "AUTOTUNER_CACHE", "AUTOTUNER_DATABASE", "RAY_ADDRESS",
    "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH",
)  # fmt: skip
"""Variables that a new machine does not have."""


def fast_linker() -> str:
    """Return a folder for `COMPILER_PATH` with gold as `ld`, where that is installed.

    Linking with torch is a third of what a small kernel takes to compile: 0.5 s, and 0.15 s with gold.
    """
    folder = os.path.join(os.environ["HOME"], "linker")
    gold = shutil.which("ld.gold")
    if gold is not None:
        os.makedirs(folder, exist_ok=True)
        os.symlink(gold, os.path.join(folder, "ld"))
    return folder


def move_to_an_empty_home() -> str:
    """Give this process, and all that it starts, an empty home, and return it; modules read it when imported."""
    home = tempfile.mkdtemp(prefix="home-")
    os.environ.update({name: os.path.join(home, folder).rstrip("/") for name, folder in HOMES.items()})
    for name in FORGOTTEN:
        os.environ.pop(name, None)
    os.environ.setdefault("COMPILER_PATH", fast_linker())
    return home


IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
"""The workers of a run have the home of the process that started them."""

HOME = os.environ["HOME"] if IS_WORKER else move_to_an_empty_home()


class Unheard(logging.Logger):
    """A logger without handlers: pytest gives its own to each logger that does not propagate."""

    def addHandler(self, hdlr: logging.Handler) -> None:
        """Leave the handler out."""


# torch writes down all that it compiles, for a logger that has a handler: a twelfth of the time of a compilation.
logging.setLoggerClass(Unheard)
logging.getLogger("torch.__trace")
logging.setLoggerClass(logging.Logger)

from _pytest.runner import pytest_runtest_protocol as run  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests.postgresql import NoServerError, server  # noqa: E402
from tests.stack import in_one_piece  # noqa: E402

# A busy machine takes as long as it likes for an example, and for drawing it.
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

os.environ.setdefault("AUTOTUNER_LOG_FORMAT", "words")  # of the services and workers that tests start
os.environ.setdefault("AUTOTUNER_QUIET", "1")
# Two workers share the cores: threads of a measured kernel that wait for each other's core take ten times as long.
os.environ.setdefault("AUTOTUNER_THREADS", "1")
# Inductor compiles in this process: a pool would import torch in processes of its own, for each that compiles.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# g++ knows the instructions of this processor. Each process that compiles would try them: 0.8 s, the first one 6 s.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Dynamo collects garbage after each compilation, which frees nothing that matters to a test.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
# Each process that a test starts would compile the modules of this package anew: half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A collection looks at all objects of torch and transformers, and frees little: a seventh of a compilation's time.
gc.set_threshold(100_000, 50, 100)


def pytest_configure(config: pytest.Config) -> None:
    if not IS_WORKER:
        config.add_cleanup(lambda: shutil.rmtree(HOME, ignore_errors=True))


def cuda_is_available() -> bool:
    """Say whether torch is installed and sees a CUDA device; imports torch, so it is asked only for marked tests."""
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is no CUDA device; of modules that run at once, begin with small ones.

    Tests that take long and mostly wait, for processes that were killed, are alone in their modules: begun last, they
    would be waited for by all others.
    """
    if hasattr(config, "workerinput"):
        counts = Counter(item.nodeid.partition("::")[0] for item in items)
        items.sort(key=lambda item: (counts[item.nodeid.partition("::")[0]], item.nodeid.partition("::")[0]))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not cuda_is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test as pytest does, with memory for its frames in one piece."""
    return in_one_piece(run, item, nextitem)


@pytest.fixture(autouse=True)
def faults_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an error in a rule of capture be one of the test."""
    rules = sys.modules.get("autotuner.runtime.capture.fragment_rules")
    if rules is not None:
        monkeypatch.setattr(rules, "FAULTS_RAISE", True)


@pytest.fixture(autouse=True)
def guards_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have dynamo not time the guards of what it compiled: it empties the processor's caches first, for 20 ms."""
    guards = sys.modules.get("torch._dynamo.guards")
    if guards is not None:
        monkeypatch.setattr(guards, "profile_guard_manager", lambda *_: 0.0)


@pytest.fixture(scope="module", autouse=True)
def own_garbage() -> Iterator[None]:
    """Have garbage collections look only at what a module's tests made: of all that a run holds, each takes 1 s.

    What a module leaves behind is collected at its end, before the next module's tests leave it out.
    """
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """The URL of a PostgreSQL server: that in AUTOTUNER_TEST_POSTGRES, or one that ends with these tests."""
    given = os.environ.get("AUTOTUNER_TEST_POSTGRES")
    if given:
        yield given
        return
    try:
        context = server()
        started = context.__enter__()
    except NoServerError as error:
        pytest.skip(str(error))
    yield started.url
    context.__exit__(None, None, None)


def pytest_sessionfinish() -> None:
    """Say nothing of calls that fell back, at the end of a process in which tests made them do so.

    What is left goes with the process: pytest would collect it five times, ten seconds in all.
    """
    tally = sys.modules.get("autotuner.runtime.fallbacks")
    if tally is not None:
        tally.TALLY.fallbacks.clear()
    gc.freeze()
