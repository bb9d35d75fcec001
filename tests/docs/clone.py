"""A clone as documents have it: set up, with an empty home, on a host of its own network names."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from socket import gethostname

from tests.docs.blocks import ROOT

STAND_INS = Path(__file__).parent / "stand_ins"
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "*.pyc.*", "*-pytest-*.pyc", ".*_cache", ".hypothesis", "*.egg-info", "*.sqlite*"
)  # `*.pyc.*` are being written; without the modules' bytecode, each clone would compile them anew
HOSTS = f"127.0.0.1 localhost {gethostname()} db head.example tuning.example\n::1 localhost\n"
HERE = (
    "TMPDIR", "CXX", "COMPILER_PATH", "TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_VEC_ISA_OK", "TORCH_DYNAMO_RUN_GC_AFTER_COMPILE",
)  # fmt: skip
"""Variables of this run: how it compiles, and where it keeps that; no document compiles what another one has."""
NAMESPACES = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
AS_ROOT = [[], ["--user", "--map-root-user"]]


@dataclass(frozen=True)
class Clone:
    """A copy of this checkout with a virtual environment, a home in which nothing is, and the stand-ins."""

    folder: Path
    home: Path

    def environment(self) -> dict[str, str]:
        own = str(Path(sys.prefix) / "bin")
        rest = [path for path in os.environ["PATH"].split(os.pathsep) if path != own]
        return {
            "PATH": os.pathsep.join([str(self.folder / ".venv" / "bin"), str(STAND_INS), *rest]),
            "HOME": str(self.home),
            "CURL_HOME": str(STAND_INS / "curl"),  # an answer with an error is an error
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # as on the command line: what builds is what is installed
            "HF_HUB_OFFLINE": "1",
            "LANG": "C.UTF-8",
            "COLUMNS": "100",
            "TERM": "dumb",
            "OMP_NUM_THREADS": "1",
            **{name: os.environ[name] for name in HERE if name in os.environ},
        }


def clone(folder: Path) -> Clone:
    """Make a clone in a folder that is not there yet."""
    shutil.copytree(ROOT, folder / "autotuner", symlinks=True, ignore=LEFT_OUT)
    (folder / "home").mkdir()
    made = Clone(folder / "autotuner", folder / "home")
    _set_up(made)
    return made


def _set_up(made: Clone) -> None:
    """Make `.venv` as scripts/setup would, of what is installed here; nothing is fetched."""
    environment = made.folder / ".venv"
    venv.create(environment, with_pip=False, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).glob("autotuner-*/"):
        shutil.copytree(path, packages / path.name)  # so that torch finds the backend by its name
    lines = [str(made.folder), str(_dependencies()), str(STAND_INS), "import autotuner_stand_ins"]
    (packages / "clone.pth").write_text("\n".join(lines) + "\n")
    program = environment / "bin" / "autotuner"
    program.write_text(f"#!{environment / 'bin' / 'python'}\nfrom autotuner.cli import main\n\nmain()\n")
    program.chmod(0o755)
    wanted = "{ pwd && python3 --version && cat pyproject.toml constraints.txt scripts/setup; } | sha256sum"
    subprocess.run(["bash", "-c", f"{wanted} >.venv/setup-stamp"], cwd=made.folder, env=made.environment(), check=True)


def _dependencies() -> Path:
    """Return a folder with what is installed here, but for this package.

    All clones of a run have this one: what is compiled against torch is found again only where torch has the same path.
    """
    made = Path(os.environ["HOME"], "dependencies")
    if not made.exists():
        being_made = Path(tempfile.mkdtemp(dir=made.parent))
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if not path.name.startswith(("autotuner", "__editable__", "__pycache__")) and path.suffix != ".pth":
                (being_made / path.name).symlink_to(path)
        with suppress(OSError):  # another worker was faster
            being_made.rename(made)
    return made


@cache
def own_network() -> list[str] | None:
    """Return the command that runs another one in a network of its own, or None where that is not allowed here."""
    for more in AS_ROOT:
        command = ["unshare", *more, *NAMESPACES]
        if shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    return None
