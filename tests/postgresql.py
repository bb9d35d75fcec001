"""A PostgreSQL server for tests: its own folder, a socket and no port; it ends with the process that started it."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from sqlalchemy import create_engine, text

START_S = 60.0
INSTALLED = Path("/usr/lib/postgresql")
OPTIONS = {
    "listen_addresses": "", "fsync": "off", "full_page_writes": "off",
    "shared_buffers": "32MB", "max_connections": "200", "logging_collector": "off",
}  # fmt: skip
MISSING = (
    "needs PostgreSQL: install Debian's package `postgresql` (scripts/setup does, as root), or give a server's URL in "
    "AUTOTUNER_TEST_POSTGRES"
)


class NoServerError(Exception):
    """PostgreSQL is not installed, or there is no user that it could run as."""


class Server:
    """A server that can be stopped, killed, frozen and started again; `url` names its database."""

    def __init__(self, folder: Path, programs: Path, prefix: list[str]) -> None:
        self._folder, self._programs, self._prefix = folder, programs, prefix
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"postgresql+psycopg://tester@/postgres?host={folder}"

    def make(self) -> None:
        made = [self._programs / "initdb", "-D", self._folder / "data", "-U", "tester", "-A", "trust", "-E", "UTF8"]
        command = [*self._prefix, *map(str, made), "--no-sync", "--no-locale", "--no-instructions"]
        found = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
        if found.returncode:
            raise NoServerError(found.stderr.strip())

    def start(self) -> None:
        """Start it, and return when it answers."""
        options = [word for name, value in OPTIONS.items() for word in ("-c", f"{name}={value}")]
        command = [self._programs / "postgres", "-D", self._folder / "data", "-k", self._folder, *options]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._prefix, *map(str, command)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
            )
        engine, until = create_engine(self.url), time.monotonic() + START_S
        while True:
            try:
                with engine.connect():
                    break
            except Exception:
                if self._process.poll() is not None or time.monotonic() > until:
                    raise NoServerError((self._folder / "log").read_text()[-2000:]) from None
                time.sleep(0.05)
        engine.dispose()

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop it, and wait: by SIGINT, it ends all sessions; by SIGQUIT at once, as after a loss of power."""
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait()

    def tell_all(self, which: signal.Signals) -> None:
        """Send a signal to it and all its sessions: SIGSTOP freezes them, SIGCONT wakes them."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for number in (self._process.pid, *map(int, children)):
            with suppress(ProcessLookupError):  # a session may end meanwhile
                os.kill(number, which)


@contextmanager
def server() -> Iterator[Server]:
    """Run a server inside.

    Raises:
        NoServerError: it is not installed, or there is nobody whom it could run as.
    """
    versions = sorted(INSTALLED.glob("*/bin/postgres"), key=lambda path: float(path.parts[-3]))
    if not versions:
        raise NoServerError(MISSING)
    folder = Path(tempfile.mkdtemp(prefix="autotuner-postgresql-"))
    try:
        made = Server(folder, versions[-1].parent, _prefix(folder))
        made.make()
        made.start()
        try:
            yield made
        finally:
            made.tell_all(signal.SIGCONT)
            made.stop(signal.SIGQUIT)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _prefix(folder: Path) -> list[str]:
    """Return the command that runs another as who may run a server (root may not), and ends it with this process."""
    if shutil.which("setpriv") is None:
        raise NoServerError("needs `setpriv` of Debian's package `util-linux`, by which the server ends with the tests")
    if os.getuid() != 0:
        return ["setpriv", "--pdeathsig", "QUIT"]
    user = next((user for user in ("postgres", "nobody") if _is_user(user)), None)
    if user is None:
        raise NoServerError("needs a user `postgres` or `nobody`: PostgreSQL refuses to run as root")
    found = pwd.getpwnam(user)
    os.chown(folder, found.pw_uid, found.pw_gid)
    identity = [f"--reuid={found.pw_uid}", f"--regid={found.pw_gid}", "--clear-groups"]
    return ["setpriv", *identity, "--pdeathsig", "QUIT"]


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


@contextmanager
def schema(url: str) -> Iterator[str]:
    """Make an empty schema on a server, and yield the URL that leads there; it is removed at the end."""
    name = f"test_{uuid4().hex}"
    engine = create_engine(url, pool_pre_ping=True)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {name}"))
    given: Mapping[str, str] = {"options": f"-csearch_path={name}"}
    yield engine.url.update_query_dict(given).render_as_string(hide_password=False)
    with engine.begin() as connection:
        connection.execute(text(f"DROP SCHEMA {name} CASCADE"))
    engine.dispose()
