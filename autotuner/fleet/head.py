"""The head of a cluster, as another host finds it: whether it answers, lets this host in, and has the same versions."""

import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from time import monotonic, sleep
from typing import Any

from autotuner.checkpoint import checkpoint
from autotuner.errors import DeviceError, InputError
from autotuner.fleet.importing import imported
from autotuner.fleet.token import refused, require_token

PORT = 6379
CONNECT_S = 5.0
WAIT_S = 120.0
"""For a head that starts at the same time as its hosts and its runner, such as by Slurm."""

AGAIN_S = 1.0
ASK_S = 60.0
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from autotuner.fleet.head import tell_head_versions; tell_head_versions(sys.argv[2])"
)


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT".

    Raises:
        InputError: it is none.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"{text!r} is no address of a head: write HOST:PORT, such as head:{PORT}")
    return host.strip("[]"), int(port)


def check_head(address: str, wait_s: float = 0.0, tell: Callable[[str], None] = lambda _: None) -> None:
    """Check that a head answers, lets this host in, and has the same versions of Ray and Python.

    Args:
        wait_s: for a head that does not answer yet.
        tell: told once what is waited for.

    Raises:
        ClusterTokenError: this host has no token, or another one.
        DeviceError: no head answers, or it has other versions.
    """
    host, port = address_of(address)
    until, is_told = monotonic() + wait_s, False
    while True:
        try:
            socket.create_connection((host, port), CONNECT_S).close()
            break
        except OSError as error:
            why = str(error.strerror or error)
            if monotonic() >= until:
                raise DeviceError(
                    f"nothing answers at {address} ({why}): start the head there with `autotuner node --head --port "
                    f"{port}`, and open the port in the firewall"
                ) from error
        if not is_told:
            tell(f"nothing answers at {address} yet ({why}); waiting for the head, {wait_s:g} s at most")
            is_told = True
        checkpoint()
        sleep(AGAIN_S)
    require_token(os.environ, address)
    found = head_versions(address)
    if own_versions() != found:
        raise DeviceError(f"the head at {address} has {_words(found)}, and this host {_words(own_versions())}: "
                          "install the same on all hosts of a cluster")  # fmt: skip


def own_versions() -> dict[str, str]:
    """Return the versions that all hosts of a cluster share: Ray's, and Python's to the minor."""
    return {"ray": imported().__version__, "python": ".".join(platform.python_version_tuple()[:2])}


def head_versions(address: str) -> dict[str, str]:
    """Return the versions of a head; a process of its own asks, for Ray logs there, or aborts, what is an error here.

    Raises:
        ClusterTokenError: it does not let this host in.
        DeviceError: it is no head.
    """
    known = imported().__version__
    host, port = address_of(address)
    asked = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), f"{socket.gethostbyname(host)}:{port}"]
    try:
        ran = subprocess.run(
            asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_S, check=False
        )
        answer = json.loads(ran.stdout) if ran.returncode == 0 else {"error": _last_line(ran.stderr)}
    except subprocess.TimeoutExpired:
        answer = {"error": f"no answer within {ASK_S:g} s"}
    if "refused" in answer:
        raise refused(os.environ, address)
    if "error" in answer:
        raise DeviceError(f"what answers at {address} is no head of Ray {known}: {answer['error']}")
    return {"ray": answer["ray"], "python": answer["python"]}


def tell_head_versions(address: str) -> None:
    """Ask a head for its versions, and write them, or why there are none, as JSON."""
    ray = imported()
    from ray._common.usage.usage_constants import CLUSTER_METADATA_KEY
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        client = GcsClient(address=address)
        text = client.internal_kv_get(CLUSTER_METADATA_KEY, namespace=b"cluster", timeout=CONNECT_S)
        value: Mapping[str, str] = json.loads(text or b"{}")
        python = ".".join(str(value.get("python_version")).split(".")[:2])
        answer: dict[str, Any] = {"ray": str(value.get("ray_version")), "python": python}
    except ray.exceptions.AuthenticationError:
        answer = {"refused": True}
    except Exception as error:
        answer = {"error": _last_line(str(error)) or type(error).__name__}
    sys.stdout.write(json.dumps(answer))


def _last_line(text: str) -> str:
    """Return what the last line of a log or an error says, without its date and place in Ray's sources."""
    line = text.strip().rpartition("\n")[2]
    return re.sub(r"^\[[^]]*\] \S+:\d+: ", "", line).partition(". ")[0]


def _words(versions: Mapping[str, str]) -> str:
    return f"Ray {versions['ray']} on Python {versions['python']}"
