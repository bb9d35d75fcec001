"""The fleet's files of `deploy`, run on an empty machine: hosts that are this one, and everything else as it is."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.bench.supervised import descendants
from tests.fleet.deployed import (
    DEPLOY,
    OWN,
    ROOT,
    SCONTROL,
    SRUN,
    WITHOUT_GPU,
    Unit,
    answers,
    empty_machine,
    free_port,
    program,
    running,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")]

WAIT_S = 120.0
NODES = """
import json, sys, ray
from autotuner.fleet.cluster import connected
with connected(sys.argv[1]):
    print(json.dumps([node["Alive"] for node in ray.nodes()]))
"""


@dataclass
class Installed:
    """A host with a head that systemd has started, on an empty machine."""

    folder: Path
    program: Path
    port: int
    head: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def token(self) -> Path:
        return self.folder / "head" / "autotuner" / ".ray" / "auth_token"

    def unit(self, kind: str, host: str) -> Unit:
        facts = {"AUTOTUNER_DATABASE": f"sqlite:///{self.folder}/jobs.sqlite", "AUTOTUNER_HEAD": self.address}
        return Unit(f"autotuner-{kind}.service", self.folder / host, self.program, facts, self.port)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("installed")
    made = program(folder / "bin", "autotuner", WITHOUT_GPU)
    unit = Unit("autotuner-head.service", folder / "head", made, {"AUTOTUNER_HEAD": ""}, port := free_port())
    with running(unit.command, unit.environment, folder / "head.log") as process:
        until(lambda: process.poll() is not None or answers(port), WAIT_S, folder / "head.log")
        assert process.poll() is None, (folder / "head.log").read_text()
        yield Installed(folder, made, port, process)


def test_the_head_draws_a_private_token_and_says_where(installed: Installed) -> None:
    assert installed.token.stat().st_mode & 0o777 == 0o600
    said = (installed.folder / "head.log").read_text()
    assert f"the cluster's token was drawn into {installed.token}" in said
    assert installed.token.read_text() not in said


WRONG = {
    "missing": r"no token for the cluster at \S+: there is no \S+/auth_token; copy the head's token",
    "wrong": r"does not let this host in: the token in \S+/auth_token is not the head's; copy the head's token",
    "empty": r"the token file \S+/auth_token is empty: copy the head's token",
    "unreadable": r"the token in \S+/auth_token cannot be read \(Is a directory\): copy the head's token",
}


def with_token(home: Path, kind: str) -> None:
    path = home / ".ray" / "auth_token"
    path.parent.mkdir(parents=True)
    if kind == "unreadable":
        path.mkdir()
    elif kind != "missing":
        path.write_text({"wrong": "0" * 64, "empty": ""}[kind])
        path.chmod(0o600)


@pytest.mark.parametrize("kind", list(WRONG))
def test_the_unit_of_a_host_without_the_token_ends_with_one_sentence_and_stays_down(
    installed: Installed, kind: str
) -> None:
    unit = installed.unit("node", kind)
    with_token(Path(unit.environment["HOME"]), kind)
    ran = subprocess.run(
        unit.command, env=unit.environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert re.fullmatch(rf"error ClusterTokenError: .*{WRONG[kind]}.*\n", ran.stderr), ran.stderr
    assert (ran.returncode, ran.stdout) == (9, "")
    assert not unit.starts_again_after(ran.returncode)
    assert unit.starts_again_after(3), "a head that is away comes back"


@pytest.mark.parametrize(
    "words",
    [
        "node ADDRESS --no-gpu --check",
        "worker --fleet --address ADDRESS --device cuda",
        "tune bert-encoder:tiny --fleet --address ADDRESS --device cuda",
    ],
)
def test_every_command_without_the_token_ends_with_one_sentence(installed: Installed, words: str) -> None:
    home = installed.folder / words.split()[0]
    environment = empty_machine(home, AUTOTUNER_DATABASE=f"sqlite:///{home}/jobs.sqlite")
    with_token(home, "wrong")
    command = f"{OWN} {words.replace('ADDRESS', installed.address)}"
    ran = subprocess.run(
        ["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert re.fullmatch(rf"error ClusterTokenError: .*{WRONG['wrong']}.*\n", ran.stderr), ran.stderr
    assert ran.returncode == 9


def test_with_a_copy_of_the_token_a_host_may_join_also_where_ray_was_imported_before(installed: Installed) -> None:
    home = installed.folder / "copied"
    environment = empty_machine(home)
    environment["RAY_AUTH_TOKEN_PATH"] = str(installed.token)
    command = f"{OWN} node {installed.address} --no-gpu --check"
    ran = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "this host can take part\n", "")
    program = f"import ray{NODES}"
    asked = subprocess.run(
        [sys.executable, "-c", program, installed.address], env=environment, capture_output=True, text=True, check=False
    )
    assert (asked.returncode, asked.stdout) == (0, "[true]\n"), asked.stderr


def listening(process: int) -> dict[int, str]:
    """Return the ports at which a process and what comes from it listen for others, with their programs."""
    found: dict[str, int] = {}
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{kind}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            address, _, port = local.partition(":")
            if state == "0A" and address != "0100007F":
                found[f"socket:[{inode}]"] = int(port, 16)
    ports = {}
    for number in descendants(process):
        for link in Path(f"/proc/{number}/fd").glob("*"):
            if link.is_symlink() and (socket := str(link.readlink())) in found:
                ports[found[socket]] = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ports


def test_what_listens_on_the_network_is_what_the_document_lists(installed: Installed) -> None:
    unit = installed.unit("runner", "head")
    log = installed.folder / "runner.log"
    with running(unit.command, {**unit.environment, "AUTOTUNER_LOG_FORMAT": "json"}, log) as runner:
        until(lambda: log.exists() and '"worker_started"' in log.read_text(), WAIT_S, log)
        assert runner.poll() is None
        ports = {**listening(runner.pid), **listening(installed.head.pid)}
    assert ports.keys() >= {installed.port}
    table = (ROOT / "docs" / "fleet.md").read_text().partition("| port | ")[2].partition("\n\n")[0]
    listed = re.findall(r"^\| [^|]+ \| `([^`]+)`", table, re.MULTILINE)
    others = {port: command for port, command in ports.items() if not any(name in command for name in listed)}
    assert not others
    assert not any("dashboard.py" in command for command in ports.values())
    assert len(listed) >= 4


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script on the first of two hosts, both of which are this one."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        program(tmp_path / "bin", name, text)
    return empty_machine(
        tmp_path / "home", RECORDED=str(tmp_path), HOSTS="127.0.0.1 localhost", SLURM_JOB_NODELIST="host[1-2]",
        AUTOTUNER=str(program(tmp_path / "own", "autotuner", WITHOUT_GPU)), AUTOTUNER_PORT=str(free_port()),
        AUTOTUNER_DATABASE=f"sqlite:///{tmp_path}/jobs.sqlite", AUTOTUNER_LOG_FORMAT="json",
    )  # fmt: skip


def test_slurms_script_makes_a_fleet_of_two_hosts_with_a_runner_and_ends_it(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    slurm["PATH"] = f"{tmp_path}/bin:{slurm['PATH']}"
    script, log, port = DEPLOY / "slurm" / "fleet.sbatch", tmp_path / "log", slurm["AUTOTUNER_PORT"]
    with running([str(script)], slurm, log) as batch:
        until(lambda: batch.poll() is not None or '"worker_started"' in log.read_text(), WAIT_S, log)
        assert batch.poll() is None, log.read_text()
        until(lambda: batch.poll() is not None or log.read_text().count("Ray runtime started") == 2, WAIT_S, log)
        token = (tmp_path / "token").read_text()
        asked = subprocess.run(
            [sys.executable, "-c", NODES, f"127.0.0.1:{port}"], env={**slurm, "RAY_AUTH_TOKEN": token},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (asked.returncode, asked.stdout) == (0, "[true, true]\n"), asked.stderr + log.read_text()
        assert len(token) == 64
        assert not (tmp_path / "home" / ".ray" / "auth_token").exists(), "each allocation has a token of its own"
        family = descendants(batch.pid)
        batch.send_signal(signal.SIGTERM)
        assert batch.wait(WAIT_S) != 0
        until(lambda: not any(Path(f"/proc/{number}").exists() for number in family), WAIT_S, log)
    steps = [line.partition(f" {slurm['AUTOTUNER']} ")[2] for line in (tmp_path / "srun").read_text().splitlines()]
    assert sorted(steps) == sorted(
        [
            f"node --head --port {port}",
            f"node 127.0.0.1:{port}",
            f"worker --fleet --address 127.0.0.1:{port} --device cuda",
        ]
    )


def test_the_worker_of_compose_draws_a_token_and_serves_this_host(tmp_path: Path) -> None:
    (services,) = yaml.safe_load_all((DEPLOY / "compose.gpu.yaml").read_text())
    words = services["services"]["worker"]["command"]
    home, log = tmp_path / "home", tmp_path / "log"
    environment = empty_machine(  # a container sees no cluster of other tests
        home, AUTOTUNER_DATABASE=f"sqlite:///{tmp_path}/jobs.sqlite", AUTOTUNER_LOG_FORMAT="json", RAY_ADDRESS="local"
    )
    with running(["sh", "-c", f'exec {OWN} "$@"', "sh", *words], environment, log) as worker:
        until(lambda: worker.poll() is not None or '"worker_started"' in log.read_text(), WAIT_S, log)
        assert worker.poll() is None, log.read_text()
        assert (home / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600


CONTAINER = """#!/bin/sh
# Writes how it was called, and stays as long as it is told to.
echo "$(basename "$0") $*" >>"$RECORDED/calls"
exec sleep "$(cat "$RECORDED/$(basename "$0")")"
"""


def pods() -> dict[str, dict[str, Any]]:
    """Return the containers of the cluster's pods, by name."""
    (cluster,) = yaml.safe_load_all((DEPLOY / "kubernetes" / "fleet.yaml").read_text())
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    containers = [container for group in groups for container in group["template"]["spec"]["containers"]]
    return {container["name"]: container for container in containers}


@pytest.mark.parametrize("first", ["ray", "autotuner"])
def test_the_head_of_kubernetes_runs_ray_and_the_worker_and_ends_with_either(tmp_path: Path, first: str) -> None:
    container = pods()["ray-head"]
    for name in ("ray", "autotuner"):
        program(tmp_path / "bin", name, CONTAINER)
        (tmp_path / name).write_text("0.5" if name == first else "100")
    start = "ray start --head --block --num-cpus=8"
    environment = empty_machine(tmp_path / "home", RECORDED=str(tmp_path), KUBERAY_GEN_RAY_START_CMD=start)
    environment["PATH"] = f"{tmp_path}/bin:{environment['PATH']}"
    command = [*container["command"], *container["args"]]
    with ExitStack() as stack:
        process = stack.enter_context(running(command, environment, tmp_path / "log"))
        process.wait(WAIT_S)
    calls = sorted((tmp_path / "calls").read_text().splitlines())
    assert calls == ["autotuner worker --fleet --address 127.0.0.1:6379 --device cuda", start]


def test_a_host_of_kubernetes_becomes_ray(tmp_path: Path) -> None:
    container = pods()["ray-worker"]
    program(tmp_path / "bin", "ray", CONTAINER)
    (tmp_path / "ray").write_text("0")
    environment = empty_machine(tmp_path, RECORDED=str(tmp_path), KUBERAY_GEN_RAY_START_CMD="ray start --block")
    environment["PATH"] = f"{tmp_path}/bin:{environment['PATH']}"
    subprocess.run([*container["command"], *container["args"]], env=environment, timeout=WAIT_S, check=True)
    assert (tmp_path / "calls").read_text() == "ray start --block\n"
    assert json.dumps(container["env"]).count("RAY_health_check") == 3
