"""The calls in hand of a Ray cluster's jobs, kept by an actor of its own."""

import threading
from collections.abc import Collection, Sequence
from functools import cache
from time import monotonic
from typing import Any
from uuid import uuid4

from autotuner.fleet.actor import IDLE_S
from autotuner.fleet.cluster import NAMESPACE
from autotuner.fleet.importing import imported
from autotuner.fleet.in_hand import InHand

NAME = "in-hand"
START_S, ANSWER_S = 30.0, 5.0
"""The time for its start, and for an answer. Without an answer jobs may time the same calls, and nothing is lost."""

AGAIN_S = 60.0


class InHandActor:
    """The process that keeps the account; it leaves when nobody has asked for `IDLE_S`."""

    def __init__(self) -> None:
        self._own: Any = imported().get_runtime_context().current_actor
        self._account, self._asked_at = InHand(), monotonic()
        threading.Thread(target=self._watch, name="idle", daemon=True).start()

    def claim(self, job: str, keys: Sequence[str]) -> tuple[list[str], bool]:
        self._asked_at = monotonic()
        return self._account.claim(job, keys)

    def release(self, job: str, keys: Collection[str]) -> None:
        self._asked_at = monotonic()
        self._account.release(job, keys)

    def leave(self, job: str) -> None:
        self._account.leave(job)

    def _watch(self) -> None:
        while monotonic() - self._asked_at < IDLE_S:
            threading.Event().wait(1.0)
        imported().kill(self._own)


@cache
def _remote_class() -> Any:
    return imported().remote(num_cpus=0, max_restarts=0)(InHandActor)


class RayClaims:
    """The calls in hand of the connected cluster, for one job. While their actor is away, the job has all it asks for.

    Args:
        scope: of what compares: the same call of another scope is another one.
        job: its name; another attempt at it has what the one before had in hand. "" for one that has no other attempt.
    """

    def __init__(self, scope: str, job: str = "") -> None:
        self._ray, self._scope, self._job = imported(), scope, job or uuid4().hex
        self._actor: Any = None
        self._again_at, self._answer_s = 0.0, START_S
        self.has_others = False

    def claim(self, keys: Sequence[str]) -> Collection[str]:
        answer = self._ask("claim", [f"{self._scope}/{key}" for key in keys])
        if answer is None:
            self.has_others = True  # who knows
            return ()
        elsewhere, self.has_others = answer
        return {key.rpartition("/")[2] for key in elsewhere}

    def release(self, keys: Collection[str]) -> None:
        self._tell("release", [f"{self._scope}/{key}" for key in keys])

    def leave(self) -> None:
        self._tell("leave")

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Return the answer of the actor, which is started if need be; None where it has none."""
        if monotonic() < self._again_at:
            return None
        try:
            if self._actor is None:
                options = {"name": NAME, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
                self._actor = _remote_class().options(**options, scheduling_strategy=self._strategy()).remote()
                self._answer_s = START_S
            answer = self._ray.get(getattr(self._actor, method).remote(self._job, *arguments), timeout=self._answer_s)
            self._answer_s = ANSWER_S
            return answer
        except self._ray.exceptions.GetTimeoutError:
            self._again_at = monotonic() + AGAIN_S
        except (ValueError, self._ray.exceptions.RayError):  # it has just left, or its host is gone
            self._actor = None
        return None

    def _strategy(self) -> Any:
        """Return where the actor starts: on the host of the tuning tasks, if it can."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(self._ray.get_runtime_context().get_node_id(), soft=True)

    def _tell(self, method: str, *arguments: Any) -> None:
        """Tell the actor something, and wait for nothing: what it is asked later comes later."""
        if self._actor is not None:
            try:
                getattr(self._actor, method).remote(self._job, *arguments)
            except (ValueError, self._ray.exceptions.RayError):
                self._actor = None
