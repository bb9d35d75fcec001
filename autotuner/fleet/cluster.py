"""Ray: connecting to a cluster, its GPUs, and the actors on them."""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

from autotuner.database import Device, FleetGpu
from autotuner.errors import DeviceError
from autotuner.fleet.fleet_measurer import Log, silent
from autotuner.fleet.head import check_head
from autotuner.fleet.importing import imported
from autotuner.fleet.software import difference
from autotuner.fleet.spec import MeasurerSpec
from autotuner.fleet.token import draw_token

NAMESPACE = "autotuner"
LOOK_S = 2.0
"""Between two looks at the cluster's hosts."""


@contextmanager
def connected(
    address: str | None = None, gpus: int | None = None, *, wait_s: float = 0.0, log: Log = silent
) -> Iterator[None]:
    """Be connected to a Ray cluster.

    Args:
        address: of the cluster, as HOST:PORT or "auto"; None for the one of this host, or else one of its own, which
            ends with this.
        gpus: start a cluster of one's own on this host with so many GPUs.
        wait_s: for a head that does not answer yet.
        log: called with an event and facts while the head is waited for.

    Raises:
        ClusterTokenError: this host has no token of the cluster, or cannot draw one for its own.
        DeviceError: there is no such cluster, or it is of another version.
        MissingError: Ray is not installed.
    """
    ray = imported()
    common: dict[str, Any] = {
        "namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR,
    }  # fmt: skip
    own = {"include_dashboard": False, **({} if gpus is None else {"num_gpus": gpus})}
    head = None if gpus is not None else _head_here() if address in (None, "auto") else address
    if address is not None and head is None:
        raise DeviceError("no Ray cluster on this host: start its head with `autotuner node --head`")
    if head is None:
        draw_token(os.environ)
    else:
        check_head(head, wait_s, lambda words: log("head_awaited", message=words))
    try:
        ray.init(**({"address": "local", **own} if head is None else {"address": head}), **common)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise DeviceError(f"no Ray cluster at {head or 'this host'}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _head_here() -> str | None:
    """Return the address of the cluster that RAY_ADDRESS names, or that runs on this host; None where there is none."""
    imported()
    from ray._private import services

    services.find_gcs_addresses.cache_clear()
    try:
        found: str | None = services.canonicalize_bootstrap_address("auto")
    except ConnectionError:
        return None
    return found


def actor_of(slot: str, node: str) -> Any:
    """Return the actor of a slot, which is started if need be.

    Raises:
        ValueError: the one of before is about to end.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from autotuner.fleet.actor_process import remote_class

    affinity = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"name": f"gpu/{slot}", "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    return remote_class().options(scheduling_strategy=affinity, **options).remote(slot)


def cluster_name() -> str:
    """Return the name of the connected cluster's runner: that of the next one is the same after a restart."""
    return f"fleet {imported().get_runtime_context().gcs_address}"


class FleetDevices:
    """The classes of GPUs of the connected cluster: one actor of each host is asked once.

    Args:
        spec: of any measurer.
    """

    def __init__(self, spec: MeasurerSpec) -> None:
        self._ray, self._spec = imported(), spec.to_text()
        self._device_type = str(spec.arguments.get("device_type", "cuda"))
        self._names: dict[str, Device] = {}
        self._asked: dict[str, Any] = {}
        self._gpus: dict[str, int] = {}
        self._failures: dict[str, str] = {}
        self._looked_at = -LOOK_S

    @property
    def gpus(self) -> int:
        """The number of GPUs of all hosts."""
        self._look()
        return sum(self._gpus.values())

    def known(self) -> Sequence[Device]:
        """Return type and name of each class that is there now."""
        self._look()
        return sorted({self._names[node] for node in self._gpus if node in self._names})

    def nodes(self) -> set[str]:
        """Return the first parts of the slots of the GPUs that are there."""
        self._look()
        return {node[:12] for node in self._gpus}

    def failing(self) -> list[FleetGpu]:
        """Return the GPUs that were asked what they are and could not say, or have other software."""
        return [
            FleetGpu(f"{node[:12]}/0", self._device_type, "", False, reason)
            for node, reason in self._failures.items()
            if node in self._gpus and node not in self._names
        ]

    def _look(self) -> None:
        if monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = monotonic()
        nodes = {n["NodeID"]: int(n["Resources"].get("GPU", 0)) for n in self._ray.nodes() if n["Alive"]}
        self._gpus = {node: gpus for node, gpus in nodes.items() if gpus}
        for node in self._gpus.keys() - self._names.keys() - self._asked.keys():
            try:
                self._asked[node] = actor_of(f"{node[:12]}/0", node).look.remote(self._spec)
            except (ValueError, self._ray.exceptions.RayError):
                continue
        for node, reference in list(self._asked.items()):
            if self._ray.wait([reference], timeout=0)[0]:
                del self._asked[node]
                try:
                    answer = json.loads(self._ray.get(reference))
                except self._ray.exceptions.RayError:
                    continue
                other = difference(answer.get("software", "")) if "device_type" in answer else ""
                if other:
                    self._failures[node] = other
                elif "device_type" in answer:
                    self._names[node] = answer["device_type"], answer["device_name"]
                else:
                    self._failures[node] = answer.get("failed") or answer.get("refused", "")
