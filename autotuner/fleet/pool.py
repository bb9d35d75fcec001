"""Pool: the protocol between a fleet's measurer and what runs its actors, and the events that come from there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from autotuner.fleet.roster import Gpu

Question = Literal["measure", "ask", "compile"]


@dataclass(frozen=True)
class Joined:
    """An actor is ready."""

    gpu: Gpu


@dataclass(frozen=True)
class Began:
    """An actor has begun with what was sent under this ticket."""

    ticket: int


@dataclass(frozen=True)
class Answered:
    """An answer has come; it holds `refused`, with the error's class, where the question cannot be answered."""

    ticket: int
    answer: Mapping[str, Any]


@dataclass(frozen=True)
class Lost:
    """An actor is gone, with all that was sent to it.

    Args:
        failure: why its measurer could not go on; "" where the actor died.
        host: its whole host is gone.
    """

    slot: str
    failure: str = ""
    host: bool = False


Event = Joined | Began | Answered | Lost


class ActorPool(Protocol):
    """The actors of a fleet for one measurer. It starts those that are missing, and tells what becomes of them."""

    def poll(self, timeout_s: float) -> Sequence[Event]:
        """Return what has happened since the last time; wait for the first event, at most for so long."""

    def send(self, ticket: int, slot: str, question: Question, request: Mapping[str, Any]) -> None:
        """Ask the actor of a slot; what becomes of it is an event."""

    def forget(self, ticket: int) -> None:
        """Tell nothing more of a question."""

    def close(self) -> None:
        """Leave the actors to others."""
