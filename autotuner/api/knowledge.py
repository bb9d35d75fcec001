"""Configurations that are known for layers and regions: from a database on this machine, or from a service."""

import json
import shlex
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from autotuner.errors import ConfigurationError, InputError, NotFoundError, ServiceError, TunedWarning, stacklevel
from autotuner.extras import needed_for
from autotuner.ir.matching import same_tensors
from autotuner.ir.models import Model, load_model
from autotuner.ir.numerics import Numerics, allowed_classes
from autotuner.ir.records import canonical_json
from autotuner.measure.devices import environment
from autotuner.plan.configuration import Configuration, load_configuration
from autotuner.plan.request import family_key

if TYPE_CHECKING:
    from torch import nn

    from autotuner.server.client import Client

Given = Configuration | str | Path | Sequence[Configuration | str | Path]
"""A configuration, the path of its file, or several of these."""
ASKED_S = 5.0
"""A service that takes longer does not keep a compilation waiting, or `apply`."""
SILENT_S = 60.0
"""A service that did not answer is not asked again for so long."""
USABLE = ("exact", "doubtful")

_SUBMITTED: dict[tuple[str, str, str, str, int | None], int] = {}
_SILENT_UNTIL: dict[str, float] = {}


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
    """The knowledge of a database. Nothing tunes in the background: that takes the device which trains.

    What was tuned with the numerics that are allowed is preferred to what was tuned without.

    Args:
        budget_bytes: that it was tuned with; None for what was tuned without one.
    """

    def __init__(self, database: str | Path, numerics: Numerics = "exact", budget_bytes: int | None = None) -> None:
        self._database, self._numerics, self._budget_bytes = database, numerics, budget_bytes

    def find(self, models: Iterable[Model], device_type: str) -> list[Configuration | None]:
        with needed_for("looking configurations up in a database"):
            from autotuner.database import open_database

        here = environment(device_type)
        found: list[Configuration | None] = []
        with open_database(self._database) as opened:
            for model in models:
                matches = (
                    opened.configurations.best(
                        family_key=family_key(model.family, self._budget_bytes, each), dtype=model.dtype,
                        extents=model.extents, device_type=here.device_type, device_name=here.device_name,
                    ) for each in allowed_classes(self._numerics)
                )  # fmt: skip
                stored = next((match.stored for match in matches if match.status in USABLE), None)
                found.append(None if stored is None else _readable(stored.text))
        return found

    def want(self, models: Iterable[Model], device_type: str) -> str:  # noqa: ARG002
        budget = "" if self._budget_bytes is None else f", budget_bytes={self._budget_bytes}"
        return f"autotuner.tune(model, example_inputs=...{budget}) tunes them"


def _readable(text: str) -> Configuration | None:
    """Return a stored configuration; one that this version cannot run is none, and the next tuning makes another."""
    try:
        return Configuration.from_json(json.loads(text), "a stored configuration")
    except ConfigurationError:
        return None


class OfConfigurations:
    """Configurations that are given: no database and no service is asked."""

    def __init__(self, configurations: Given) -> None:
        """Read those that are given as paths.

        Raises:
            InputError: as `loaded`.
        """
        self._known = loaded(configurations)

    def find(self, models: Iterable[Model], device_type: str) -> list[Configuration | None]:
        here = environment(device_type)
        found = [self._of(model, here.device_type) for model in models]
        others = {str(each.environment["device_name"]) for each in found if each is not None} - {here.device_name}
        if others:
            warnings.warn(
                f"configurations were tuned on another device, {' and '.join(sorted(others))}, and may not be the "
                f"fastest on {here.device_name}", TunedWarning, stacklevel=stacklevel(),
            )  # fmt: skip
        return found

    def want(self, models: Iterable[Model], device_type: str) -> str:  # noqa: ARG002
        count = len(self._known)
        given = "the configuration that was given is not" if count == 1 else f"none of {count} configurations given is"
        return f"{given} for this computation, in these shapes and types"

    def _of(self, model: Model, device_type: str) -> Configuration | None:
        wanted = (family_key(model.family), model.dtype, dict(model.extents), device_type)
        for each in self._known:
            own = each.model
            if (family_key(own.family), own.dtype, dict(own.extents), each.environment["device_type"]) == wanted:
                return each
        graph = model.graph()  # it may be one of a model file, with names of its own
        there = (each for each in self._known if each.environment["device_type"] == device_type)
        return next((each for each in there if same_tensors(graph, each.model.graph()) is not None), None)


def loaded(given: Given) -> list[Configuration]:
    """Return configurations; those that are given as paths are read.

    Raises:
        InputError: something else is given.
        ConfigurationError: a file is no configuration.
    """
    found: list[Configuration] = []
    for each in given if isinstance(given, list | tuple) else [given]:
        if isinstance(each, str | Path):
            found.append(load_configuration(each))
        elif isinstance(each, Configuration):
            found.append(each)
        else:
            raise InputError(f"{each!r} is no configuration: give one, the path of its file, or a list of these")
    return found


class OfService:
    """The knowledge of a service, whose workers tune what is not known.

    A process submits one job for each model. Of several processes that train one model, the first submits.

    Args:
        budget_bytes: as of `OfDatabase`, and jobs are submitted with it.
    """

    def __init__(self, server: "str | Client", numerics: Numerics = "exact", budget_bytes: int | None = None) -> None:
        self._server, self._numerics, self._budget_bytes = server, numerics, budget_bytes

    def find(self, models: Iterable[Model], device_type: str) -> list[Configuration | None]:
        here = environment(device_type)
        found: list[Configuration | None] = []
        with self._asked() as client:
            for model in models:
                views = (
                    client.best(
                        dict(model.definition), extents=model.extents, dtype=model.dtype, device=here.device_type,
                        device_name=here.device_name, budget_bytes=self._budget_bytes, numerics=each,
                    ) for each in allowed_classes(self._numerics)
                )  # fmt: skip
                best = next((view.best for view in views if view.match in USABLE), None)
                where = f"a configuration of {client.url}"
                found.append(None if best is None else Configuration.from_json(best.configuration, where))
        return found

    def want(self, models: Iterable[Model], device_type: str) -> str:
        here = environment(device_type)
        if _rank():
            return "the first process asks the service"
        jobs = []
        with self._asked() as client:
            for model in models:
                asked = (self._numerics, self._budget_bytes)
                key = (client.url, here.device_name, canonical_json(model.to_json()), *asked)
                if key not in _SUBMITTED:
                    _SUBMITTED[key] = client.submit(
                        dict(model.definition), extents=model.extents, dtype=model.dtype, device=here.device_type,
                        device_name=here.device_name, numerics=self._numerics, budget_bytes=self._budget_bytes,
                    ).id  # fmt: skip
                jobs.append(_SUBMITTED[key])
            url = client.url
        return f"{url} tunes them ({'job' if len(jobs) == 1 else 'jobs'} {', '.join(map(str, jobs))})"

    @contextmanager
    def _asked(self) -> "Iterator[Client]":
        """Yield a client, unless the service did not answer a moment ago: one that is away is waited for once.

        Raises:
            ServiceError: it does not answer, or did not.
        """
        url = self._server if isinstance(self._server, str) else self._server.url
        if monotonic() < _SILENT_UNTIL.get(url, 0.0):
            raise ServiceError(f"{url} did not answer a moment ago; a later compilation asks again", passing=True)
        try:
            with asked(self._server) as client:
                yield client
        except ServiceError as error:
            if error.passing:
                _SILENT_UNTIL[url] = monotonic() + SILENT_S
            raise


def _rank() -> int:
    """Return the number of this process among those that train together."""
    from torch import distributed

    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def device_type_of(model: "str | Model | nn.Module") -> str:
    """Return the type of the device that a module is on, "cpu" where it has no memory yet, or is no module."""
    if isinstance(model, str | Model):
        return "cpu"
    from torch import nn

    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return "cpu" if first is None or first.device.type == "meta" else str(first.device.type)


def asked(server: "str | Client") -> "AbstractContextManager[Client]":
    """Return a client for a few questions; one that was given is not closed behind them."""
    with needed_for("asking a service"):
        from autotuner.server.client import Client

    return Client(server, timeout_s=ASKED_S, retries=0) if isinstance(server, str) else nullcontext(server)


def best_known(module: "nn.Module", model: Model, server: "str | Client") -> tuple[Configuration, str]:
    """Return the best configuration that a service knows for a module here, and what to say of it, if anything.

    Raises:
        NotFoundError: it knows none that fits; the message says what differs and how to submit a job.
    """
    here = environment(next(module.parameters()).device.type)
    with asked(server) as client:
        # A configuration with a mask over keys runs calls without one as well.
        options = [dict(model.options)]
        if options[0].get("attention_mask") is False:
            options.append(options[0] | {"attention_mask": True})
        views = [
            client.best(model.name, extents=model.extents, options=chosen, dtype=model.dtype,
                        device=here.device_type, device_name=here.device_name) for chosen in options
        ]  # fmt: skip
        url = client.url
    for match in ("exact", "doubtful", "near_device"):
        for view in views:
            best = view.best
            if best is not None and view.match == match and best.device_type == here.device_type:
                partly = "" if best.complete else (
                    f"configuration {best.id} is doubtful: {' '.join(best.doubts)}" if best.doubts else
                    f"not all that could matter was measured for configuration {best.id}: a job stopped at its limit"
                )  # fmt: skip
                note = partly if match != "near_device" else (
                    f"the configuration was tuned on another device, {best.device_name}, and may not be the fastest on "
                    f"{here.device_name}; for one of this device: {_submitting(model, here.device_name, url)}"
                )  # fmt: skip
                return Configuration.from_json(best.configuration, f"configuration {best.id} of {url}"), note
    near = next((view for view in views if view.best is not None), None)
    wanted = f"{model.name} {model.dtype} {' '.join(f'{axis}={n}' for axis, n in model.extents.items())}"
    known = "" if near is None else f" (the nearest differs in {', '.join(near.differs)})"
    raise NotFoundError(
        f"{url} knows no configuration of {wanted} on {here.device_name}{known}; for one: "
        f"{_submitting(model, here.device_name, url)}"
    )


def _submitting(model: Model, device_name: str, url: str) -> str:
    """Return the command that has a model tuned on a device."""
    file = load_model(model.name).definition
    words = ["autotuner submit", model.name, *(f"--extent {axis}={n}" for axis, n in model.extents.items())]
    words += [
        f"--option {name}={value}" for name, value in model.options.items() if value != file.options[name].default
    ]
    words += [f"--dtype {model.dtype}"] if model.dtype != file.dtype else []
    return " ".join([*words, f"--device-name {shlex.quote(device_name)}", f"--server {url}"])
