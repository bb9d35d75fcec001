"""Logs: events with their facts on standard error, as JSON lines for programs or as words for people at a terminal.

Each line has the time, a level, an event and, in JSON, the process; the id of the request, the job and the worker where
there are such. Texts from outside never begin a line of their own, and no token is written.
"""

import json
import logging
import re
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

from autotuner.database import PREFIX
from autotuner.settings import LogFormat

OWN = "autotuner"
LEVELS = {
    "connections_refused": logging.WARNING, "connections_not_accepted": logging.WARNING,
    "database_waited_for": logging.WARNING, "database_failed": logging.ERROR, "process_died": logging.ERROR,
    "disk_full": logging.ERROR,
    "results_lost": logging.ERROR, "job_failed": logging.ERROR,
    "job_given_up": logging.WARNING, "job_lost": logging.WARNING, "job_end_not_stored": logging.ERROR,
    "job_not_put_back": logging.ERROR, "beat_failed": logging.WARNING, "gpu_lost": logging.ERROR,
    "task_killed": logging.WARNING,
}  # fmt: skip
"""Of events that are told without a level; all others are information."""

SECRET = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{20,}}")
STARS = f"{PREFIX}***"
RUN = re.compile(r"(?<![A-Za-z0-9_%-])[A-Za-z0-9_%-]++")
"""Text with percent-encoding, as it stands in a URL."""

DECODED_MAX = 8
"""Of a text that is encoded again and again, so many layers are looked into."""

BOUND: ContextVar[Mapping[str, Any]] = ContextVar("facts of all that is logged here", default={})  # noqa: B039 (never changed)
log = logging.getLogger("autotuner.server")


def tell(event: str, **facts: Any) -> None:
    """Log an event with its facts, by the level of the event."""
    log.log(LEVELS.get(event, logging.INFO), event, extra={"facts": facts})


class WorkerLog:
    """Logs the events of a worker, each with the worker's name from the first that has it, on whatever thread."""

    def __init__(self) -> None:
        self._worker: dict[str, Any] = {}

    def __call__(self, event: str, **facts: Any) -> None:
        if "worker" in facts:
            self._worker = {"worker": facts["worker"]}
        tell(event, **{**self._worker, **facts})


@contextmanager
def bound(**facts: Any) -> Generator[None]:
    """Have facts in all that this thread or task, and what it starts, logs for the time of a `with` block."""
    token = BOUND.set({**BOUND.get(), **facts})
    try:
        yield
    finally:
        BOUND.reset(token)


def described(record: logging.LogRecord) -> dict[str, Any]:
    """Return the facts of a record, in the order in which they are written."""
    time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    found: dict[str, Any] = {"time": time, "level": record.levelname.lower(), "pid": record.process}
    facts = getattr(record, "facts", None)
    if facts is None and not record.name.startswith(log.name):  # of another library
        found |= {"event": "message", "logger": record.name, "text": record.getMessage()}
    else:
        found["event"] = record.getMessage()
    return {**found, **BOUND.get(), **(facts or {})}


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        found = described(record)
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return without_tokens(json.dumps(found, default=str))


class Words(logging.Formatter):
    """One line for each record: when, what, and its facts as Python writes them; a traceback is indented."""

    def format(self, record: logging.LogRecord) -> str:
        found = described(record)
        time, level, event, _ = (found.pop(name) for name in ("time", "level", "event", "pid"))
        loud = [level.upper()] if record.levelno >= logging.WARNING else []
        line = " ".join([time, *loud, event, *(f"{name}={value!r}" for name, value in found.items())])
        if record.exc_info:
            trace = self.formatException(record.exc_info).splitlines()
            line = "\n  ".join([line, *(row.encode("unicode_escape").decode("ascii") for row in trace)])
        return without_tokens(line)


def without_tokens(text: str) -> str:
    """Return a text with stars in place of each token, also of one that is percent-encoded, whole or in part."""
    return SECRET.sub(STARS, RUN.sub(_decoded_without_tokens, text))


def _decoded_without_tokens(run: re.Match[str]) -> str:
    text = run[0]
    for _ in range(DECODED_MAX):
        decoded = unquote(text, errors="replace")
        if decoded == text:
            return run[0]
        if SECRET.search(decoded):
            return STARS
        text = decoded
    return "***"  # encoded so often that it hides something


@contextmanager
def logging_to_stderr(form: LogFormat = "auto", level: str = "info") -> Generator[None]:
    """Write the logs of this package, and what goes wrong in uvicorn, on standard error for the time of a block.

    Args:
        form: "auto" for words at a terminal and JSON elsewhere.
        level: the least that is written: "info" for a line per request, "warning" for what goes wrong.
    """
    handler = logging.StreamHandler(sys.stderr)
    words = form == "words" or (form == "auto" and sys.stderr.isatty())
    handler.setFormatter(Words() if words else JsonLines())
    own, uvicorns = logging.getLogger(OWN), logging.getLogger("uvicorn")
    before = [(logger, logger.level, logger.propagate) for logger in (own, uvicorns)]
    own.setLevel(level.upper())
    uvicorns.setLevel(logging.WARNING)
    for logger in (own, uvicorns):
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, old, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(old)
            logger.propagate = propagate
