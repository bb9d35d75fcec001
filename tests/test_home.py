"""Tests run as on a new machine: with a home that this run has made."""

import os
import pwd
import tempfile
from pathlib import Path


def test_no_test_sees_the_users_home() -> None:
    home = Path.home()
    assert home != Path(pwd.getpwuid(os.getuid()).pw_dir)
    assert home.parent == Path(tempfile.gettempdir())
    assert {"XDG_CACHE_HOME", "AUTOTUNER_CACHE", "RAY_AUTH_TOKEN"}.isdisjoint(os.environ)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert Path(os.environ[name]).parent == home
