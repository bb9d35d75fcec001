"""Stand-ins for what runs the files of `deploy`: systemd, Slurm's commands, and an installed `autotuner`."""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from scripts.bench.supervised import descendants

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OWN = f"{shlex.quote(sys.executable)} -m autotuner.cli"
WITHOUT_GPU = f"""#!/bin/sh
# Its host has no GPU: `node` gets --no-gpu.
if [ "$1" = node ]; then shift; exec {OWN} node --no-gpu "$@"; fi
exec {OWN} "$@"
"""
SRUN = """#!/bin/bash
# Runs the command here, whatever host it is meant for, and writes how it was called.
host=
printf '%s\\n' "$*" >>"$RECORDED/srun"
while [[ $1 == --* ]]; do
    case $1 in
        --nodelist) host=$2; shift 2 ;;
        --nodes | --ntasks) shift 2 ;;
        --overlap) shift ;;
        *) echo "srun: unknown $1" >&2; exit 2 ;;
    esac
done
[[ " $HOSTS " == *" $host "* ]] || { echo "srun: no host $host" >&2; exit 2; }
printf '%s' "$RAY_AUTH_TOKEN" >"$RECORDED/token"
exec "$@"
"""
SCONTROL = """#!/bin/bash
[[ "$*" == "show hostnames $SLURM_JOB_NODELIST" ]] || { echo "scontrol: $*" >&2; exit 2; }
printf '%s\\n' $HOSTS
"""


def program(folder: Path, name: str, text: str) -> Path:
    """Write a program."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def empty_machine(home: Path, **others: str) -> dict[str, str]:
    """Return the environment of a process on a machine with an empty home."""
    home.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**kept, "HOME": str(home), "PYTHONPATH": paths, **others}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def answers(port: int) -> bool:
    with socket.socket() as asked:
        asked.settimeout(1.0)
        return asked.connect_ex(("127.0.0.1", port)) == 0


def until(holds: Callable[[], bool], seconds: float, log: Path) -> None:
    """Wait until something holds; the log says why it does not."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, log.read_text(errors="replace") if log.exists() else "no log"
        time.sleep(0.1)


@contextmanager
def running(command: list[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command, and end it in the end with all that it has started."""
    with log.open("ab") as written:
        process = subprocess.Popen(
            command, env=dict(environment), cwd=environment["HOME"], stdin=subprocess.DEVNULL, stdout=written,
            stderr=written,
        )  # fmt: skip
    try:
        yield process
    finally:
        family = descendants(process.pid)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for number in family:
            if Path(f"/proc/{number}").exists():
                subprocess.run(["kill", "-KILL", str(number)], stderr=subprocess.DEVNULL, check=False)


class Unit:
    """A unit of systemd, as far as its processes see it.

    Args:
        name: of the file.
        state: folder that stands for /var/lib.
        program: that stands for the installed `autotuner`.
        facts: lines of /etc/autotuner/environment.
        port: that stands for 6379.
    """

    def __init__(self, name: str, state: Path, program: Path, facts: Mapping[str, str], port: int) -> None:
        text = (DEPLOY / "systemd" / name).read_text()
        found: dict[str, list[str]] = {}
        for key, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE):
            found.setdefault(key, []).append(value.replace("%S", str(state)))
        self._found = found
        folder = state / found["StateDirectory"][0]
        folder.mkdir(parents=True, exist_ok=True)
        assert found["WorkingDirectory"] == [str(folder)]
        given = dict(pair.split("=", 1) for pair in found["Environment"])
        self.environment = {**empty_machine(folder), **facts, **given}
        line = found["ExecStart"][0].replace("/opt/autotuner/bin/autotuner", str(program)).replace("6379", str(port))
        self.command = shlex.split(re.sub(r"\$\{(\w+)\}", lambda name: self.environment[name[1]], line))

    def starts_again_after(self, status: int) -> bool:
        """Say whether systemd starts it anew after it ended by itself."""
        kept_down = " ".join(self._found.get("RestartPreventExitStatus", [])).split()
        return self._found["Restart"] == ["always"] and str(status) not in kept_down
