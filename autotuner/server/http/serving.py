"""Serving: the application behind uvicorn, until it is told to end."""

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Collection, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

import uvicorn
from fastapi import FastAPI

from autotuner.database import SERVING, Database, open_database
from autotuner.errors import InputError
from autotuner.server.http.access import Quota
from autotuner.server.http.application import QUOTA, create_app
from autotuner.server.http.connections import Connection, handle_loop_error
from autotuner.server.http.guard import Hosts, allowed_origin
from autotuner.server.http.observing import Observed
from autotuner.server.logs import logging_to_stderr, tell
from autotuner.settings import LogFormat

GRACE_S = 4
"""For how long requests in hand may go on when the service is told to end; a worker beside it needs as long again."""

BACKLOG = 128
"""Connections that wait to be accepted. asyncio accepts as many in one go, and logs as many failures."""

log = logging.getLogger("autotuner.server.http")


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Options of a service, the same in all of its processes.

    Args:
        host: address or name to listen at.
        port: 0 for any that is free; the log says which.
        allowed_hosts: names that it answers to beside that of `host` and this machine's own.
        allowed_origins: of other sites whose pages may ask it (CORS).
        trusted_proxies: addresses or networks whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed.
        quota: of each client.
        log_level: "info" for a line per request, "warning" for what goes wrong.
        log_format: of the log on standard error.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    allowed_hosts: Collection[str] = ()
    allowed_origins: Collection[str] = ()
    trusted_proxies: Collection[str] = ()
    quota: Quota = QUOTA
    log_level: str = "info"
    log_format: LogFormat = "auto"

    def __post_init__(self) -> None:
        for text in self.trusted_proxies:
            try:
                ip_network(text)
            except ValueError as error:
                raise InputError(
                    f"--trusted-proxy {text!r}: write the address or the network of a proxy, such as 10.0.0.7"
                ) from error


def serve(
    database_url: str,
    options: ServiceOptions | None = None,
    *,
    listener: socket.socket | None = None,
) -> None:
    """Serve a database over HTTP until the process is told to end (SIGTERM, SIGINT).

    Requests in hand are answered, open streams of events end at once. The log goes to standard error.

    Args:
        database_url: URL, or path of an SQLite file.
        listener: a socket that listens; by default one is made.

    Raises:
        InputError: nobody can listen there, what is allowed is no host, or others could ask and there is no token.
        DatabaseError: the database cannot be opened.
    """
    options = options or ServiceOptions()
    with ExitStack() as opened:
        listener = opened.enter_context(listener or listen(options.host, options.port))
        database = opened.enter_context(open_database(database_url, timeouts=SERVING, log=tell, reopens=True))
        hosts, local = checked(options, listener, database)
        opened.enter_context(logging_to_stderr(options.log_format, options.log_level))
        origins = [allowed_origin(text) for text in options.allowed_origins]
        app = create_app(database, hosts, local=local, quota=options.quota, origins=origins)
        Server(app, listener, ending=database.hurry, trusted_proxies=options.trusted_proxies).run()


def checked(options: ServiceOptions, listener: socket.socket, database: Database) -> tuple[Hosts, bool]:
    """Return the hosts that a service answers to, and whether it answers this machine alone.

    Raises:
        InputError: it would answer others, and its database has no valid token; or what is allowed is no host.
    """
    address = listener.getsockname()[0]
    hosts = Hosts((options.host, address), options.allowed_hosts)
    local = ip_address(address).is_loopback and not options.allowed_hosts and not options.trusted_proxies
    if not local and not any(token.state == "valid" for token in database.tokens.all()):
        how = (
            f"listening at {options.host}" if not ip_address(address).is_loopback else "behind a proxy or another name"
        )
        raise InputError(
            f"{how}, the service can be reached by others, and the database has no valid token: make one with "
            "`autotuner token create NAME --role admin`, or listen at 127.0.0.1, without --allow-host and "
            "--trusted-proxy, where only this machine asks"
        )
    return hosts, local


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        InputError: nobody can listen there.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        # A socket that names its protocol: only then does asyncio turn Nagle's algorithm off, which would hold each
        # body back for 40 ms.
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        raise InputError(
            f"cannot listen at {host}:{port}: {error}; give an address of this machine and a port that is free (0 for "
            "any)"
        ) from error
    return listener


class Server(uvicorn.Server):
    """An application at a socket; `should_exit` ends it, as a signal does.

    Unlike uvicorn's own, it ends the application's event streams as soon as it is told to end, and returns from `run`
    however it was told. Then it calls `ending` as well.
    """

    def __init__(
        self,
        app: FastAPI,
        listener: socket.socket,
        *,
        ending: Callable[[], None] = lambda: None,
        trusted_proxies: Collection[str] = (),
    ) -> None:
        super().__init__(
            uvicorn.Config(
                Observed(app), log_config=None, access_log=False, lifespan="on", loop="asyncio",
                timeout_graceful_shutdown=GRACE_S, server_header=False, http=Connection, ws="none", backlog=BACKLOG,
                proxy_headers=bool(trusted_proxies), forwarded_allow_ips=list(trusted_proxies),
            )
        )  # fmt: skip
        self._listener = listener
        self._end_streams: Callable[[], None] = app.state.end_streams
        self._ending = ending

    @property
    def url(self) -> str:
        """URL that it listens at."""
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets or [self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(handle_loop_error)
        await super().startup(sockets)
        log.info("serving", extra={"facts": {"url": self.url}})

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_streams()
        self._ending()
        log.info("ending")
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.end_half_body()
        await super().shutdown(sockets)
        log.info("ended")

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Have signals end this server, and nothing else: uvicorn would raise them again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
