"""Who else computes on a CUDA device, for real; apart from other tests, whose measuring processes would be counted."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autotuner.ir.records import Call
from autotuner.measure import Measurer

MakeCall = Callable[..., Call]

pytestmark = pytest.mark.gpu


def test_the_process_that_asks_may_compute_on_the_device_itself_and_another_one_is_warned_of(
    planted: str, add: MakeCall, tmp_path: Path
) -> None:
    held = torch.zeros(1, device="cuda")
    race = [add("good")]
    with Measurer(device_type="cuda", cache_dir=tmp_path, modules=[planted]) as first:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*comput.* on CUDA device")
            ((_, alone),) = first.measure([race])
        with (
            Measurer(device_type="cuda", cache_dir=tmp_path, modules=[planted]) as second,
            pytest.warns(UserWarning, match="^another process computes on CUDA device GPU-"),
        ):
            ((_, beside),) = second.measure([race])
    assert (alone.status, beside.status) == ("ok", "ok")
    assert held.is_cuda
