"""The image, as far as it is known without building it: what goes in, who runs it, where it listens, how it ends."""

import json
import re
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from autotuner.database import open_database
from autotuner.server.http.guard import Hosts
from autotuner.settings import Settings
from tests.server.http.listening import listening

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, each with what follows its name, on one line."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(name.upper(), rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


def of(steps: list[tuple[str, str]], name: str) -> list[str]:
    return [rest for found, rest in steps if found == name]


def environment(steps: list[tuple[str, str]]) -> dict[str, str]:
    return dict(pair.split("=", 1) for rest in of(steps, "ENV") for pair in shlex.split(rest))


def let_in(path: str) -> bool:
    """Return whether .dockerignore lets a path of the repository into the build; its last rule that fits decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        rule = line.removeprefix("!").removeprefix("**/")
        parts = path.split("/")
        nested = any(fnmatch(part, rule) for part in parts) if "**/" in line else fnmatch(parts[0], rule)
        if nested or fnmatch(path, rule):
            ignored = not line.startswith("!")
    return not ignored


def test_what_is_copied_is_there_and_let_in(steps: list[tuple[str, str]]) -> None:
    sources = [source for rest in of(steps, "COPY") for source in rest.split()[:-1]]
    assert {"pyproject.toml", "constraints.txt", "autotuner", "search_spaces"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists()
        assert let_in(source), source
    assert let_in("autotuner/server/http/serving.py")
    assert not any(map(let_in, (".git", "tests", "autotuner/__pycache__", "timings.sqlite")))


def test_everything_that_the_package_is_made_from_is_copied(steps: list[tuple[str, str]]) -> None:
    copied = {source for rest in of(steps, "COPY") for source in rest.split()[:-1]}
    named = re.findall(
        r'^(?:readme = "|license-files = \[")([^"]+)', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert len(named) == 2
    assert set(named) <= copied


def test_the_pins_that_are_installed_first_are_there(steps: list[tuple[str, str]]) -> None:
    """The command between `$(` and `)` is run as the image's shell would run it."""
    (command,) = {found for rest in of(steps, "RUN") for found in re.findall(r"\$\((grep [^)]+\)[^)]*)\)", rest)}
    ran = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.split("==")[0] for line in ran.stdout.splitlines()] == ["setuptools", "torch"]


def test_it_runs_as_a_user_who_is_a_number_and_not_root(steps: list[tuple[str, str]]) -> None:
    user = of(steps, "USER")[-1]
    assert re.fullmatch(r"[1-9][0-9]*(:[1-9][0-9]*)?", user)
    assert any(f"--uid {user.partition(':')[0]} " in rest for rest in of(steps, "RUN")), "the user is made"
    names = [name for name, _ in steps]
    assert max(place for place, name in enumerate(names) if name == "RUN") < names.index("USER")


def test_it_listens_where_a_published_port_reaches_it(steps: list[tuple[str, str]]) -> None:
    settings = Settings.from_environment(environment(steps))
    assert settings.host == "0.0.0.0"
    assert of(steps, "CMD") == ['["serve"]']
    assert of(steps, "EXPOSE") == ["8000"]
    hosts = Hosts([settings.host], settings.allowed_hosts)
    assert all(name in hosts for name in ("localhost", "127.0.0.1", "192.168.1.5"))


def test_its_database_is_kept_in_a_volume_that_the_user_may_write(steps: list[tuple[str, str]]) -> None:
    (volume,) = of(steps, "VOLUME")
    assert Settings.from_environment(environment(steps)).database_url.startswith(f"sqlite:///{volume}/")
    made = " ".join(of(steps, "RUN"))
    assert re.search(rf"install --directory --owner autotuner --group autotuner {volume} ", made)
    names = [name for name, _ in steps]
    assert names.index("VOLUME") > max(place for place, name in enumerate(names) if name == "RUN"), "else it is lost"


def test_a_signal_reaches_the_service_itself(steps: list[tuple[str, str]]) -> None:
    assert of(steps, "STOPSIGNAL") in ([], ["SIGTERM"])
    for name in ("ENTRYPOINT", "CMD"):
        (given,) = of(steps, name)
        assert isinstance(json.loads(given), list), "a shell would not hand the signal on"


def health_command(steps: list[tuple[str, str]]) -> list[str]:
    (health,) = of(steps, "HEALTHCHECK")
    command: list[str] = json.loads(health.partition("CMD ")[2])
    assert command[0] == "python", "the image has no curl"
    return [sys.executable, *command[1:]]


def test_its_health_check_passes_where_the_service_answers_and_fails_elsewhere(
    steps: list[tuple[str, str]], tmp_path: Path
) -> None:
    command = health_command(steps)
    assert f"http://127.0.0.1:{of(steps, 'EXPOSE')[0]}/livez" in command[-1]
    with open_database(tmp_path / "served.sqlite") as database, listening(database) as server:
        for url, code in ((server.url, 0), (f"{server.url}/nowhere", 1), ("http://127.0.0.1:1", 1)):
            asked = [*command[:-1], command[-1].replace("http://127.0.0.1:8000", url)]
            assert subprocess.run(asked, capture_output=True, check=False).returncode == code
