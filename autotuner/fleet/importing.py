"""Import of Ray, with this package's settings of it."""

import os
import sys
from collections.abc import Mapping
from typing import Any

from autotuner.extras import needed_for
from autotuner.fleet.token import MODE

HEALTH: Mapping[str, str] = {
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
}
"""A host that is frozen counts as gone after 12 s; Ray's own settings take 66 s. Hosts and runner end 20 s after their
head has gone, not 60: the next head is another cluster, which they join when they are started anew."""

SETTINGS: Mapping[str, str] = {MODE: "token", **HEALTH}


def imported() -> Any:
    """Return Ray, with token authentication and our health settings unless the environment says otherwise.

    Raises:
        MissingError: it is not installed.
    """
    is_late = "ray" in sys.modules  # it reads its settings when it is imported
    is_new = MODE not in os.environ
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    with needed_for("a fleet"):
        import ray
    if is_late and is_new and not ray.is_initialized():
        from ray._raylet import Config  # type: ignore[attr-defined]

        Config.initialize("")  # reads them again
    return ray
