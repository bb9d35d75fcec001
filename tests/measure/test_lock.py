"""The lock of a device: which file, and who shares it."""

import fcntl
from pathlib import Path

import pytest

from autotuner.measure import lock
from autotuner.measure.lock import lock_path, locked


def test_a_cuda_device_is_locked_by_its_uuid_whatever_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "cuda_uuid", lambda index: ("GPU-a", "GPU-b", "GPU-a")[index])
    assert lock_path("cuda", 0) == lock_path("cuda", 2)
    assert lock_path("cuda", 0) != lock_path("cuda", 1)
    assert "cuda" not in lock_path("cpu")


@pytest.mark.parametrize(("alone", "others_may"), [(True, False), (False, True)])
def test_compiling_shares_a_device_and_timing_does_not(tmp_path: Path, alone: bool, others_may: bool) -> None:
    path = tmp_path / "lock"
    with locked(str(path), alone=alone), path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            shared = True
        except BlockingIOError:
            shared = False
    assert shared is others_may
