"""Reads a document as its reader does: runs its blocks in order, in the folder of a clone.

`python -m tests.docs.session docs/tuning.md`, by the Python of that clone, in a network of its own. Python blocks share
their names. Commands run in `bash`, each block in a terminal of its own; what stays until it is ended does so in
another one, until the next service takes its place or the document is over.
"""

import argparse
import doctest
import fcntl
import io
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from tests.docs.blocks import PLAIN, ROOT, Block, blocks
from tests.docs.clone import HOSTS
from tests.docs.not_run import NOT_RUN
from tests.stack import in_one_piece

FOLDER = Path.cwd()
START_S = 120.0
END_S = 60.0
SKIP = 77
"""The exit code where the host lacks something that is no part of this project."""


class WrongError(Exception):
    """A block does not do what its document says."""


class Staying:
    """A command that stays, such as a service, in a terminal of its own."""

    def __init__(self, command: str, environment: dict[str, str]) -> None:
        self.command = command
        self.serves = "serve" in shlex.split(command, comments=True) or "scripts/serve" in command
        self._log = FOLDER.parent / f"staying-{time.monotonic_ns()}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(["bash", "-c", f"exec {command}"], env=environment, stdout=log, stderr=log)
        self._wait()

    def _wait(self) -> None:
        """Wait until it does what it is for."""
        deadline = time.monotonic() + START_S
        while not (is_ready() if self.serves else "worker_started" in self._log.read_text()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise WrongError(f"{self.command}: did not start:\n{self._log.read_text()}")
            time.sleep(0.1)

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise WrongError(f"{self.command}: did not end:\n{self._log.read_text()}") from None
        if code not in (0, 128 + signal.SIGTERM, -signal.SIGTERM):
            raise WrongError(f"{self.command}: ended with {code}:\n{self._log.read_text()}")


def is_ready() -> bool:
    try:
        with urlopen("http://127.0.0.1:8000/readyz", timeout=1.0) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


class Reader:
    """Runs the blocks of one document."""

    def __init__(self, path: Path) -> None:
        self._blocks = blocks(path)
        self._text = path.read_text()
        self._names: dict[str, Any] = {"__name__": "document"}
        self._staying: list[Staying] = []

    def read(self) -> None:
        for number, block in enumerate(self._blocks):
            began = time.monotonic()
            following = self._blocks[number + 1 :][:1]
            if block.language == "python":
                printed = self._python(block)
                if following and following[0].language == PLAIN and self._touch(block, following[0]):
                    compare(following[0].text, printed, block.name)
            elif block.language == "bash":
                self._commands(block)
            elif block.language == "console":
                self._console(block)
            else:
                continue
            print(f"{block.name}: {time.monotonic() - began:.1f} s", flush=True)

    def close(self) -> None:
        while self._staying:
            self._staying.pop().end()

    def _touch(self, block: Block, following: Block) -> bool:
        """Tell whether nothing stands between two blocks."""
        lines = self._text.splitlines()[block.line + len(block.text.splitlines()) + 1 : following.line - 1]
        return not any(line.strip() for line in lines)

    def _python(self, block: Block) -> str:
        """Run Python: a session must print what it shows; a block that begins with `# name.py` becomes that file."""
        names = self._names
        if ">>> " in block.text:
            for name, value in recorded_names().items():
                names.setdefault(name, value)
            told: list[str] = []
            session = doctest.DocTestParser().get_doctest(block.text, names, block.name, str(block.path), block.line)
            runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
            if runner.run(session, out=told.append, clear_globs=False).failed:
                raise WrongError("".join(told))
            names.update(session.globs)
            return ""
        file = re.match(r"# (\w+\.py)\n", block.text)
        if file is not None:
            (FOLDER / file[1]).write_text(block.text)
            return ""
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile("\n" * block.line + block.text, str(block.path), "exec"), names)
        return printed.getvalue()

    def _commands(self, block: Block) -> None:
        environment = dict(os.environ)
        for command in commands(block.text):
            if (block.path.name, command) in NOT_RUN:
                continue
            if stays(command):
                self._start(command, environment)
            else:
                run(command, environment)

    def _start(self, command: str, environment: dict[str, str]) -> None:
        """Start what stays; a service before it is ended, since one can listen there."""
        if "serve" in command:
            for before in [each for each in self._staying if each.serves]:
                self._staying.remove(before)
                before.end()
        self._staying.append(Staying(command, environment))

    def _console(self, block: Block) -> None:
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, told = part.partition("\n")
            compare(told, run(command, dict(os.environ)), block.name)


def commands(text: str) -> list[str]:
    """Return the commands of a block, without comments."""
    lines = text.replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+#.*", "", line) for line in lines if line.strip() and not line.startswith("#")]


def stays(command: str) -> bool:
    """Tell whether a command stays until it is ended."""
    words = shlex.split(command)
    words[0] = Path(words[0]).name
    ends = {"--once", "--check", "--help"} & set(words)
    if words[:2] == ["docker", "run"]:
        return "serve" in words
    return words[0] == "serve" or (words[0] == "autotuner" and words[1] in ("serve", "worker", "node") and not ends)


def run(command: str, environment: dict[str, str]) -> str:
    """Run a command, keep what it exports in the environment, and return what it prints."""
    exported = FOLDER.parent / "exported"
    script = f"trap 'env -0 >{shlex.quote(str(exported))}' EXIT\nset -euo pipefail\n{command}"
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WrongError(f"{command}\nended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    environment |= dict(pair.split("=", 1) for pair in exported.read_text().split("\0") if "=" in pair)
    return done.stdout


def compare(told: str, printed: str, name: str) -> None:
    """Check that each line of a document was printed, but for `...`."""
    lines = [line.rstrip() for line in printed.splitlines()]
    missing = [line for line in told.splitlines() if line.strip() != "..." and line.rstrip() not in lines]
    if missing:
        raise WrongError("\n".join([f"{name}: not printed:", *missing, "but:", printed]))


@cache
def recorded_names() -> dict[str, Any]:
    """Return what the sessions of docs/one-operator.md say that they use: the recording, as values."""
    from autotuner import load_configuration
    from scripts.recorded import TINY

    space = TINY.space()
    return {
        "space": space,
        "measurements": {key: TINY.measurements[key] for key in space.calls},
        "problem": TINY.problem(),
        "configuration": load_configuration("tiny.json"),
    }


def be_alone_in_the_network() -> None:
    """Switch the loopback device of this network on, and give the hosts of the documents their names."""
    with socket.socket() as any_socket:
        up = struct.pack("16sh", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(any_socket, 0x8914, up)  # SIOCSIFFLAGS
    hosts = FOLDER.parent / "hosts"
    hosts.write_text(HOSTS)
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)


@contextmanager
def database_server() -> Iterator[None]:
    """Run PostgreSQL as the host `db`, with a user and a database that the documents name."""
    from sqlalchemy import create_engine, text

    from tests import postgresql

    postgresql.OPTIONS["listen_addresses"] = "127.0.0.1"
    try:
        context = postgresql.server()
        started = context.__enter__()
    except postgresql.NoServerError as error:
        print(error)
        sys.exit(SKIP)
    try:
        engine = create_engine(started.url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text("CREATE ROLE tuner LOGIN CREATEDB"))
            connection.execute(text("CREATE DATABASE tunings OWNER tuner"))
        engine.dispose()
        yield
    finally:
        context.__exit__(None, None, None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("document", type=Path)
    parser.add_argument("--own-network", action="store_true")
    given = parser.parse_args()
    path = ROOT / given.document
    if given.own_network:
        be_alone_in_the_network()
    with ExitStack() as beside:
        if "@db/" in path.read_text():
            beside.enter_context(database_server())
        reader = Reader(path)
        try:
            in_one_piece(reader.read)
        finally:
            reader.close()


if __name__ == "__main__":
    main()
