"""Text from outside, as the command line shows it: never markup, never a control character."""

import re
from dataclasses import replace
from functools import partial
from io import StringIO
from typing import Any

import pytest
import typer.main
from rich.progress import TextColumn
from rich.table import Table
from rich.text import Text

from autotuner.cli import console, printing
from autotuner.cli.console import PlainConsole, lines
from autotuner.cli.program import app
from autotuner.cli.progress import Followed
from autotuner.plan.configuration import Configuration
from autotuner.plan.phrases import plain
from autotuner.server.client import Client
from autotuner.server.wire.responses import JobView
from tests.cli.running import Run
from tests.cli.test_asking import view
from tests.server.client.pretended import PROGRESS, Pretended, events, job, problem

BAD = ("[/x]", "[red]", "[bold]x[/bold]", ":smile:", "[link=http://x]y[/link]", "\x1b[31mred", "\x9b2J", "a\nb", "\r",
       "\u202e", "\x07", "\ud800")  # fmt: skip
SENT = BAD[:-1]
"""What JSON in UTF-8 can carry of it."""


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    made = Pretended()
    monkeypatch.setattr("autotuner.server.client.Client", partial(Client, transport=made.transport))
    return made


def shown(console: PlainConsole, thing: Any) -> str:
    console.file = StringIO()
    console.print(thing)
    return console.file.getvalue()


@pytest.mark.parametrize("text", BAD)
def test_text_is_printed_as_it_is_with_escapes_for_what_cannot_be_printed(text: str) -> None:
    console = PlainConsole()
    console._force_terminal = True
    console.width = 100
    expected = text.encode("unicode_escape").decode() if not text.isprintable() else text
    assert plain(text) == expected
    assert shown(console, text) == expected + "\n"
    table = Table("column", title=text, show_header=True)
    table.add_row(text)
    found = shown(console, table)
    assert found.count(expected) == 2
    assert not set(re.sub(r"\x1b\[[0-9;]*m", "", found)) & set("\x1b\x9b\r\x07\u202e\ud800")


def test_texts_that_belong_below_each_other_stay_there() -> None:
    assert lines(["a", "b\nc"]) == Text("a\nb\\nc")


@pytest.mark.parametrize("text", SENT)
def test_what_a_service_says_of_jobs_ends_no_command(run: Run, service: Pretended, text: str) -> None:
    said = job(state="failed", model=f"m:{text}", worker=text, message=text, device_name=text, dtype=text,
               options={"o": text}, device_type=text)  # fmt: skip
    service.on("GET /v1/jobs", {"items": [said], "next": None})
    service.on("GET /v1/jobs/3", said)
    service.on("POST /v1/jobs", said)
    service.on("GET /v1/devices", [{"type": text, "name": text, "workers": [], "environments": []}])
    service.on("GET /v1/jobs/3/events", events(said))
    for command, code in (("jobs", 0), ("jobs 3", 0), ("submit m:x", 0), ("submit m:x --wait", 1)):
        ran = run(*command.split())
        assert (ran.code, "Traceback" in ran.err) == (code, False)
        assert plain(text) in ran.out + ran.err
        assert all(line.isprintable() for line in (ran.out + ran.err).split("\n"))


@pytest.mark.parametrize("text", SENT)
def test_the_best_configuration_and_its_message_are_plain(
    run: Run,
    service: Pretended,
    found: Configuration,
    text: str,
) -> None:
    best = view(found, device_name=text, device_type=text)
    service.on("GET /v1/configurations/best", {"match": "exact", "differs": [text], "message": text, "best": best})
    ran = run("best", "bert-encoder:tiny")
    assert (ran.code, ran.out.count(plain(text)) >= 3) == (0, True)
    assert all(line.isprintable() for line in ran.out.split("\n"))


@pytest.mark.parametrize("text", SENT)
def test_a_refusal_of_a_service_is_plain(run: Run, service: Pretended, text: str) -> None:
    service.on("GET /v1/jobs/9", problem(404, f"no job{text}"))
    ran = run("jobs", "9")
    assert ran.code == 2
    assert ran.err.startswith("error NotFoundError: no job")
    assert all(line.isprintable() for line in ran.err.split("\n"))


@pytest.mark.parametrize("text", SENT)
def test_progress_on_a_terminal_is_plain(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(console.err, "_force_terminal", True)
    monkeypatch.setattr(console.err, "_file", StringIO())
    with Followed(quiet=False) as show:
        show(JobView.model_validate(job(state="running", progress=PROGRESS | {"stage": text})))
        (line,) = show.bars.tasks
        assert line.description == f"job 3 {plain(text)}"
        described = show.bars.columns[1]
        assert isinstance(described, TextColumn)
        assert plain(text) in described.render(line).plain


@pytest.mark.parametrize("text", BAD)
def test_a_configuration_is_plain(found: Configuration, capsys: pytest.CaptureFixture[str], text: str) -> None:
    environment = {**found.environment, "device_name": text}
    printing.print_configuration(replace(found, environment=environment), as_json=False)
    assert f"on {plain(text)}, " in capsys.readouterr().out


# --help


def commands() -> dict[str, Any]:
    program: Any = typer.main.get_command(app)
    found: dict[str, Any] = program.commands
    return found


@pytest.mark.parametrize("name", commands())
def test_help_loses_nothing_to_markup(name: str) -> None:
    command = commands()[name]
    texts = [command.help or "", *(getattr(parameter, "help", "") or "" for parameter in command.params)]
    for text in texts:
        assert Text.from_markup(text).plain == text


@pytest.mark.parametrize(
    "command, defaults",
    [
        ("tune", ["$AUTOTUNER_DATABASE, or else", "that of the device", "all cores"]),
        ("worker", ["$AUTOTUNER_DATABASE, or else", "that of the device", "all cores"]),
        ("serve", ["$AUTOTUNER_DATABASE, or else", "$AUTOTUNER_HOST, or else 127.0.0.1", "$AUTOTUNER_ALLOWED_HOSTS"]),
    ],
)
def test_help_says_the_defaults(run: Run, monkeypatch: pytest.MonkeyPatch, command: str, defaults: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    ran = run(command, "--help")
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", ran.out).split())
    for default in defaults:
        assert f"[default: ({default}" in text
