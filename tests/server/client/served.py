"""The service on a thread of a test."""

import socket
import threading

from autotuner.database import Database
from autotuner.server.http import create_app
from autotuner.server.http.serving import Server, listen

PATIENCE_S = 60


class Served:
    """A service on a thread of its own; it can be started anew where it was."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.url, self._port = "", 0
        self.start()

    def start(self) -> None:
        self._listener: socket.socket = listen("127.0.0.1", self._port)
        self._port = self._listener.getsockname()[1]
        self._server = Server(create_app(self._database), self._listener)
        self.url = self._server.url
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        self._listener.close()
        assert not self._thread.is_alive()
