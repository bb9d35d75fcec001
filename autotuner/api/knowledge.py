"""Configurations that are known for regions: from a database on this machine, or from a service."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from autotuner.database import open_database
from autotuner.ir.models import Model
from autotuner.measure.devices import environment
from autotuner.plan.configuration import Configuration
from autotuner.plan.request import family_key
from autotuner.server.client import Client

ASKED_S = 5.0
"""A service that takes longer does not keep a compilation waiting."""
USABLE = ("exact", "doubtful")


class Knowledge(Protocol):
    """Source of configurations of models, and of help for those that it does not know."""

    def find(self, models: Iterable[Model], device_type: str) -> list[Configuration | None]:
        """Return the best configuration of each model on a device of this machine, None where none is known.

        Raises:
            AutotunerError: nobody answers.
        """

    def want(self, models: Iterable[Model], device_type: str) -> str:
        """Have models tuned that are not known, and say in a sentence how that happens.

        Raises:
            AutotunerError: nobody answers.
        """


class OfDatabase:
    """The knowledge of a database. Nothing tunes in the background: that takes the device which trains."""

    def __init__(self, database: str | Path) -> None:
        self._database = database

    def find(self, models: Iterable[Model], device_type: str) -> list[Configuration | None]:
        here = environment(device_type)
        found: list[Configuration | None] = []
        with open_database(self._database) as opened:
            for model in models:
                match = opened.configurations.best(
                    family_key=family_key(model.family), dtype=model.dtype, extents=model.extents,
                    device_type=here.device_type, device_name=here.device_name,
                )  # fmt: skip
                usable = match.stored is not None and match.status in USABLE
                found.append(Configuration.from_json(json.loads(match.stored.text), "a stored configuration")
                             if usable and match.stored is not None else None)  # fmt: skip
        return found

    def want(self, models: Iterable[Model], device_type: str) -> str:  # noqa: ARG002
        return "autotuner.tune(model, example_inputs=...) tunes them"


class OfService:
    """The knowledge of a service, whose workers tune what is not known."""

    def __init__(self, server: str | Client) -> None:
        self._server = server

    def find(self, models: Iterable[Model], device_type: str) -> list[Configuration | None]:
        here = environment(device_type)
        found: list[Configuration | None] = []
        with _Asked(self._server) as client:
            for model in models:
                view = client.best(
                    dict(model.definition), extents=model.extents, dtype=model.dtype, device=here.device_type,
                    device_name=here.device_name,
                )  # fmt: skip
                usable = view.best is not None and view.match in USABLE
                found.append(Configuration.from_json(view.best.configuration, f"configuration {view.best.id}")
                             if usable and view.best is not None else None)  # fmt: skip
        return found

    def want(self, models: Iterable[Model], device_type: str) -> str:
        here = environment(device_type)
        with _Asked(self._server) as client:
            jobs = [
                client.submit(
                    dict(model.definition), extents=model.extents, dtype=model.dtype, device=here.device_type,
                    device_name=here.device_name,
                ).id for model in models
            ]  # fmt: skip
            url = client.url
        return f"{url} tunes them ({'job' if len(jobs) == 1 else 'jobs'} {', '.join(map(str, jobs))})"


class _Asked:
    """A client for a few questions; one that was given is not closed."""

    def __init__(self, server: str | Client) -> None:
        self._own = Client(server, timeout_s=ASKED_S, retries=0) if isinstance(server, str) else None
        self._client = self._own or server

    def __enter__(self) -> Client:
        assert isinstance(self._client, Client)
        return self._client

    def __exit__(self, *error: object) -> None:
        if self._own is not None:
            self._own.close()
