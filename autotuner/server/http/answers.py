"""Answers: the best configuration for a model on a device, as it is sent.

The document of a configuration is sent as the text that the database keeps: reading and writing it anew takes longer
than all the rest of an answer.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

from autotuner.database import Database, Match, StoredConfiguration
from autotuner.errors import NotFoundError
from autotuner.plan.configuration import Configuration

KNOWN_MAX = 8
KEPT_CONFIGURATIONS = 8
ALWAYS_ASK = "no-cache"


@dataclass(frozen=True, slots=True)
class Target:
    """A model on a device that a configuration is asked for; a device name of None is any device of the type."""

    family: str
    dtype: str
    extents: tuple[tuple[str, int], ...]
    device_type: str
    device_name: str | None


@dataclass(frozen=True, slots=True)
class TaggedBody:
    """A body, and the tag that changes with it."""

    tag: str
    body: bytes


class Answers:
    """Answers from one database; the last configurations that were explained are kept in memory."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._read = lru_cache(KEPT_CONFIGURATIONS)(self._configuration)

    def best(self, target: Target) -> TaggedBody:
        """Return the `BestView` of a target."""
        found = self._database.configurations.best(
            family_key=target.family, dtype=target.dtype, extents=dict(target.extents),
            device_type=target.device_type, device_name=target.device_name,
        )  # fmt: skip
        message = _message(self._database, target, found)
        return answer_of({"match": found.status, "differs": found.differs, "message": message}, found.stored)

    def configuration(self, configuration_id: int) -> Configuration:
        """Return a configuration; to read its document takes longer than to explain all of it.

        Raises:
            NotFoundError: there is none of this id.
            ConfigurationError: it is of another version of autotuner.
        """
        return self._read(self._database.generation, configuration_id)

    def _configuration(self, _generation: int, configuration_id: int) -> Configuration:
        stored = stored_configuration(self._database, configuration_id)
        return Configuration.from_json(json.loads(stored.text), f"configuration {configuration_id}")


def stored_configuration(database: Database, configuration_id: int) -> StoredConfiguration:
    """Return a configuration as the database has it.

    Raises:
        NotFoundError: there is none of this id.
    """
    try:
        return database.configurations.get(configuration_id)
    except NotFoundError:
        raise NotFoundError(
            f"no configuration {configuration_id}: a finished job names its own, GET /v1/configurations/best the best "
            "for a model"
        ) from None


def answer_of(head: dict[str, Any] | None, stored: StoredConfiguration | None) -> TaggedBody:
    """Return the view of a configuration, alone or as the `best` of a head."""
    view = None if stored is None else _view(stored)
    text = json.dumps(view if head is None else head | {"best": view}, separators=(",", ":"))
    # Configurations never change, so what is said about one stands for its document as well.
    tag = f'"{sha256(text.encode()).hexdigest()[:32]}"'
    if stored is not None:
        braces = "}" if head is None else "}}"
        text = f'{text[: -len(braces)]},"configuration":{stored.text}{braces}'
    return TaggedBody(tag, text.encode())


def names(if_none_match: str, tag: str) -> bool:
    """Say whether `If-None-Match` names a tag."""
    given = [text.strip().removeprefix("W/") for text in if_none_match.split(",")]
    return tag in given or given == ["*"]


def _view(stored: StoredConfiguration) -> dict[str, Any]:
    """Return a `ConfigurationView` without its document."""
    return {
        "id": stored.id,
        "dtype": stored.dtype,
        "extents": stored.extents,
        "complete": stored.complete,
        "device_type": stored.device_type,
        "device_name": stored.device_name,
        "environment_key": stored.environment_key,
        "predicted_us": stored.total_us,
        "measured_us": stored.measured_us,
        "created_at": stored.created_at.isoformat(),
        "doubts": list(stored.doubts),
    }


def _message(database: Database, target: Target, found: Match) -> str:
    """Return the sentence that explains a match."""
    stored, device = found.stored, target.device_name or f"any device of type {target.device_type}"
    if stored is None:
        return _nothing(database, target)
    if found.status == "near_device":
        runs = "it runs there, and may not be the fastest"
        if stored.device_type != target.device_type:
            runs = f"it does not run on a device of type {target.device_type}"
        return (
            f"tuned on {stored.device_name} ({stored.device_type}), not on {device}: {runs}; POST /v1/jobs tunes for "
            "that device, where a worker has one"
        )
    if found.status == "near_shape":
        return (
            f"tuned for {_shown(stored.extents)}, not for {_shown(dict(target.extents))}: it does not run with these; "
            "POST /v1/jobs tunes for them"
        )
    if stored.doubts:
        return f"tuned for exactly this, and doubtful: {' '.join(stored.doubts)} POST /v1/jobs measures again what is"
    whole = "" if stored.complete else "; not all that could matter was measured: a job stopped at its limit or gap"
    return f"tuned for exactly this{whole}"


def _nothing(database: Database, target: Target) -> str:
    known = database.configurations.known(target.family)
    if not known:
        return "nothing is known of this model with these options: POST /v1/jobs tunes for it"
    texts = list(dict.fromkeys(f"{kind} {dtype} {_shown(extents)}" for kind, dtype, extents in known))
    more = f", and {len(texts) - KNOWN_MAX} more" if len(texts) > KNOWN_MAX else ""
    wanted = f"{target.device_type} {target.dtype} {_shown(dict(target.extents))}"
    return (
        f"nothing is known of this model for {wanted}: POST /v1/jobs tunes for it; known: "
        f"{'; '.join(texts[:KNOWN_MAX])}{more}"
    )


def _shown(extents: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={extent}" for axis, extent in extents.items())
