"""Checks of a host before it joins a cluster."""

import socket
import sys
from pathlib import Path

import pytest

from autotuner.errors import ClusterTokenError, DeviceError, InputError, MissingError
from autotuner.fleet import head, node
from autotuner.fleet.importing import imported


def test_an_address_has_a_host_and_a_port() -> None:
    assert head.address_of("head:6379") == ("head", 6379)
    assert head.address_of("[::1]:6379") == ("::1", 6379)
    for wrong in ("head", "head:", ":6379", "head:0", "head:70000", "head:x"):
        with pytest.raises(InputError, match="write HOST:PORT"):
            head.address_of(wrong)


def test_a_port_that_nobody_listens_at_is_told() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(DeviceError, match=f"nothing answers at 127.0.0.1:{port}.*autotuner node --head"):
        head.check_head(f"127.0.0.1:{port}")


def test_a_head_that_starts_later_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.socket() as late:
        late.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{late.getsockname()[1]}"
        told: list[str] = []

        def start(words: str) -> None:
            told.append(words)
            late.listen()

        with pytest.raises(ClusterTokenError, match=f"no token for the cluster at {address}: there is no "):
            head.check_head(address, 30.0, start)
    assert told == [f"nothing answers at {address} yet (Connection refused); waiting for the head, 30 s at most"]


def test_other_versions_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setattr(head, "own_versions", lambda: {"ray": "2.60.0", "python": "3.11"})
        monkeypatch.setattr(head, "head_versions", lambda _: {"ray": "2.60.0", "python": "3.11"})
        head.check_head(address)
        for other in ({"ray": "2.59.0", "python": "3.11"}, {"ray": "2.60.0", "python": "3.12"}):
            monkeypatch.setattr(head, "head_versions", lambda _, found=other: found)
            with pytest.raises(DeviceError, match=f"has Ray {other['ray']} on Python {other['python']}"):
                head.check_head(address)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingError, match=r'a fleet needs ray, which is not installed: install "autotuner\[fleet\]"'):
        imported()


def test_without_a_gpu_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotuner.measure.devices.cuda.cuda_devices", list)
    with pytest.raises(DeviceError, match=r"this host has no GPU for a fleet: .*--no-gpu"):
        node.check_gpus()


def test_the_host_becomes_ray_start_with_the_health_settings_and_tokens() -> None:
    command = node.start_command(head=True, address=None, port=7000, gpus=0, rest=[])
    assert command[3:] == [
        "start", "--block", "--head", "--port=7000", "--include-dashboard=false", "--num-gpus=0",
        "--disable-usage-stats",
    ]  # fmt: skip
    joining = node.start_command(head=False, address="head:6379", port=6379, gpus=None, rest=[])
    assert joining[3:] == ["start", "--block", "--address=head:6379", "--disable-usage-stats"]
    environment = node.start_environment({"RAY_AUTH_MODE": "disabled"})
    assert environment["RAY_AUTH_MODE"] == "disabled"
    assert environment["RAY_health_check_failure_threshold"] == "3"
    assert node.start_environment({})["RAY_AUTH_MODE"] == "token"
