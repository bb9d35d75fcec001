"""What `deploy` holds, as far as it is known without Docker, Kubernetes or Slurm: commands and names exist."""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import typer
import yaml

from autotuner.cli.program import app

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
YAML = sorted(DEPLOY.rglob("*.yaml"))
COMMAND = re.compile(r"""(?:^|[ /"])(?:"?\$autotuner"?|autotuner|service|--) ((?:serve|worker|node|token|db)\b.*)""")
UNITS = sorted(DEPLOY.glob("systemd/*.service"))


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield each command of autotuner's that a file of `deploy` runs, as words after the program's name."""
    for path in YAML:
        for document in documents(path):
            for service in document.get("services", {}).values():
                if "command" in service:
                    yield path.name, service["command"]
            for container in pods_of(document).get("containers", []):
                if "command" not in container:
                    yield path.name, container["args"]
    for path in sorted(DEPLOY.rglob("*")):
        if path.is_file():
            for line in re.sub(r"\\\n#?", " ", path.read_text()).splitlines():
                found = COMMAND.search(line)
                if found and " the " not in line:
                    yield path.name, shlex.split(found[1].partition(" #")[0].rstrip(" &"))


def pods_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return what the pods of a Deployment hold."""
    found: dict[str, Any] = document.get("spec", {}).get("template", {}).get("spec", {})
    return found


@pytest.mark.parametrize(
    ("name", "words"), list(commands()), ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_the_commands_are_known_with_their_options(name: str, words: list[str]) -> None:  # noqa: ARG001
    command: Any = typer.main.get_command(app)
    words = ["6379" if word == "$port" else "head:6379" if "$" in word else word for word in words]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context(command.name, list(words), resilient_parsing=False)


def test_every_kind_of_deployment_has_commands() -> None:
    assert {name for name, _ in commands()} >= {
        "compose.yaml", "compose.gpu.yaml", "service.yaml", "fleet.yaml", "fleet.sbatch", "autotuner-service.service",
        "autotuner-head.service", "autotuner-node.service", "autotuner-runner.service",
    }  # fmt: skip


def test_the_extras_of_images_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = [path.read_text() for path in (ROOT / "Dockerfile", *YAML)]
    named = [names for text in texts for names in re.findall(r"EXTRAS[=:] ?([a-z,]+)", text)]
    assert len(named) >= 4
    assert {extra for names in named for extra in names.split(",")} <= extras.keys()


def test_pods_and_the_image_agree_on_the_user() -> None:
    user = int(re.findall(r"^USER (\d+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[-1])
    pods = [document for path in YAML for document in documents(path) if document and "runAsUser" in str(document)]
    assert len(pods) == 2
    assert set(re.findall(r"'runAsUser': (\d+)", str(pods))) == {str(user)}


def test_the_fleets_ray_is_that_of_the_extra() -> None:
    (cluster,) = documents(DEPLOY / "kubernetes" / "fleet.yaml")
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert cluster["spec"]["rayVersion"] == pinned[1]
    assert cluster["spec"]["authOptions"] == {"mode": "token"}, "whoever reaches it could run code on it"


def test_no_probe_that_ends_a_pod_asks_the_database() -> None:
    """A service goes on by itself when its database is back; one that is started without it fails."""
    found = {
        (name, container[name]["httpGet"]["path"])
        for document in documents(DEPLOY / "kubernetes" / "service.yaml")
        for container in pods_of(document).get("containers", [])
        for name in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert found == {("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")}


@pytest.mark.skipif(which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_are_understood_by_systemd(path: Path, tmp_path: Path) -> None:
    for unit in UNITS:
        text = unit.read_text().replace("/opt/autotuner/bin/autotuner", "/bin/true")
        (tmp_path / unit.name).write_text(text)
    ran = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / path.name)], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_scripts_are_understood_by_bash() -> None:
    scripts = [path for path in DEPLOY.rglob("*") if path.is_file() and path.read_text().startswith("#!")]
    assert scripts
    for path in scripts:
        assert path.stat().st_mode & 0o111, path.name
        subprocess.run(["bash", "-n", str(path)], check=True)
