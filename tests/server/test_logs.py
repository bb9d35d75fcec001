"""Logs: what a line has, and that nothing from outside makes another one."""

import json
import logging
import sys
from urllib.parse import unquote

import pytest

from autotuner.server.logs import JsonLines, WorkerLog, bound, log, logging_to_stderr, tell

Captured = pytest.CaptureFixture[str]
EVIL = "x\n2026-01-01T00:00:00 INFO request\r\x1b[2J\u2028"


def test_a_line_of_json_has_time_level_event_and_facts(capsys: Captured) -> None:
    with logging_to_stderr("json"), bound(worker="tuner-1"):
        tell("job_taken", job=3)
        tell("database_failed", error="away")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert list(first) == ["time", "level", "pid", "event", "worker", "job"]
    assert (first["level"], first["event"], first["worker"], first["job"]) == ("info", "job_taken", "tuner-1", 3)
    assert (second["level"], second["error"]) == ("error", "away")


def test_each_event_of_a_worker_has_its_name(capsys: Captured) -> None:
    told = WorkerLog()
    with logging_to_stderr("json"):
        told("worker_started", worker="tuner-1", device_type="cpu")
        told("job_taken", job=3)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["event"], line["worker"]) for line in lines] == [
        ("worker_started", "tuner-1"),
        ("job_taken", "tuner-1"),
    ]


def test_for_people_a_line_has_words(capsys: Captured) -> None:
    with logging_to_stderr("words"):
        tell("job_taken", job=3, model="a b")
        tell("job_failed", job=3)
    first, second = capsys.readouterr().err.splitlines()
    assert first.partition(" ")[2] == "job_taken job=3 model='a b'"
    assert second.partition(" ")[2] == "ERROR job_failed job=3"


@pytest.mark.parametrize("form, terminal, words", [("auto", True, True), ("auto", False, False), ("json", True, False)])
def test_words_are_for_a_terminal(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, form: str, terminal: bool, words: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with logging_to_stderr(form):  # type: ignore[arg-type]
        tell("serving")
    assert capsys.readouterr().err.startswith("{") is not words


@pytest.mark.parametrize("form", ["json", "words"])
def test_nothing_from_outside_makes_a_line_or_moves_the_cursor(capsys: Captured, form: str) -> None:
    with logging_to_stderr(form):  # type: ignore[arg-type]
        tell("request", path=EVIL)
        logging.getLogger("uvicorn.error").error(EVIL)
        try:
            raise ValueError(EVIL)
        except ValueError as error:
            log.error("failed", exc_info=error)
    text = capsys.readouterr().err
    lines = text.splitlines()
    assert not [line for line in lines if line.startswith("2026-01-01")]
    assert "\x1b" not in text
    if form == "json":
        assert [json.loads(line)["event"] for line in lines] == ["request", "message", "failed"]
        assert json.loads(lines[0])["path"] == EVIL


def test_no_token_is_written() -> None:
    secret = "autotuner_" + "aB3-_" * 8 + "xyz"
    record = logging.makeLogRecord({"msg": "request", "name": log.name, "facts": {"path": f"/v1/jobs?token={secret}"}})
    text = JsonLines().format(record)
    assert "token=autotuner_***" in text
    assert secret[10:] not in text


SECRET = "autotuner_" + "aB3-_" * 8 + "xyz"


def encoded(text: str, layers: int = 1) -> str:
    for _ in range(layers):
        text = "".join(f"%{byte:02X}" for byte in text.encode())
    return text


@pytest.mark.parametrize(
    "given",
    [
        SECRET.replace("_", "%5F"),
        SECRET.replace("_", "%5f").replace("-", "%2d"),
        SECRET.replace("a", "%61", 1),
        SECRET[:-10] + encoded(SECRET[-10:]),
        SECRET[:40].replace("B", "%42") + SECRET[40:],
        SECRET.replace("_", "%255F"),
        encoded(SECRET),
        encoded(SECRET, 2),
        encoded(SECRET.replace("_", "%5F")),
        "%41".join("x") + "autotuner%25255F" + SECRET[10:],
        SECRET.replace("_", "%" + "25" * 12 + "5F"),
    ],
)
@pytest.mark.parametrize("form", ["json", "words"])
def test_no_token_is_written_that_is_percent_encoded(capsys: Captured, form: str, given: str) -> None:
    with logging_to_stderr(form):  # type: ignore[arg-type]
        tell("request", path=f"/v1/jobs?token={given}&limit=3")
    text = unquote(unquote(unquote(capsys.readouterr().err)))
    assert "***" in text
    assert "&limit=3" in text
    assert not [part for part in (SECRET[10:30], SECRET[-10:]) if part in text]


def test_what_is_percent_encoded_and_no_token_is_written_as_it_came(capsys: Captured) -> None:
    path = "/v1/configurations/best?model=bert-encoder%3Atiny&device_name=Intel%28R%29%20Xeon%28R%29&x=100%"
    with logging_to_stderr("json"):
        tell("request", path=path)
    assert json.loads(capsys.readouterr().err)["path"] == path
