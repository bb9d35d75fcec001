"""The client: every request of the service, as a method that returns values."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, Self, TypeVar, Unpack
from urllib.parse import quote
from uuid import uuid4

import httpx2

from autotuner.errors import InputError, JobStateError, ServiceError
from autotuner.ir.numerics import Numerics
from autotuner.ir.records import Scalar, Status
from autotuner.plan.configuration import Configuration
from autotuner.plan.explanation import OperatorExplanation, TensorExplanation
from autotuner.server.client.submitting import GivenModel, best_query, checked, checked_key, given_model, params
from autotuner.server.client.transport import Clock, Transport, begin_anew
from autotuner.server.wire.requests import JobsQuery, MeasurementsQuery, Query, SubmittedJob
from autotuner.server.wire.responses import (
    BestView,
    ConfigurationView,
    DeviceView,
    Health,
    JobPage,
    JobView,
    MeasurementPage,
    MeasurementView,
    ModelView,
    StatisticsView,
)
from autotuner.server.wire.values import PAGE_MAX, JobStateName
from autotuner.settings import TuneKeywords, checked_token, client_token

PATIENCE_S = 60.0
LOOK_S = (0.2, 2.0)


T = TypeVar("T", covariant=True)


class ListPage(Protocol[T]):
    """One page of a list; `next` is None on the last."""

    @property
    def items(self) -> Sequence[T]: ...

    @property
    def next(self) -> int | None: ...


class Client:
    """Asks one service, over HTTP. A context manager; threads may share one.

    ```python
    with autotuner.Client("http://127.0.0.1:8000") as client:
        job = client.wait(client.submit("bert-encoder:tiny").id)
        configuration = client.configuration(job.configuration_id)
    ```

    Every method raises `ServiceError` where the service cannot be reached or fails, and `NotFoundError`,
    `JobStateError` or `InputError`, with the service's own sentence, where it refuses. A question is asked again where
    no service was found; a job is submitted again only if it cannot have arrived.

    Args:
        url: of the service, such as "http://127.0.0.1:8000"; a path in it is the service's prefix.
        timeout_s: for connecting, and for each wait for more of an answer.
        retries: how often a question is asked again, with growing pauses.
        transport: carries the requests in place of the network.
        clock: measures time and pauses.
        token: that the service knows this client by; by default that of `AUTOTUNER_TOKEN` or `AUTOTUNER_TOKEN_FILE`.

    Raises:
        InputError: `url` is no URL of a service, or `token` cannot be sent.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30,
        retries: int = 3,
        transport: httpx2.BaseTransport | None = None,
        clock: Clock | None = None,
        token: str | None = None,
    ) -> None:
        token = client_token() if token is None else checked_token(token, "the argument `token`")
        self._transport = Transport(url, timeout_s, retries, transport, clock or Clock(), token)
        self.page_max = PAGE_MAX

    @property
    def url(self) -> str:
        """The service's URL, without a password."""
        return self._transport.shown

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Jobs

    def submit(
        self,
        model: GivenModel,
        *,
        preset: str | None = None,
        extents: Mapping[str, int] | None = None,
        options: Mapping[str, Scalar] | None = None,
        dtype: str | None = None,
        device: str = "cpu",
        device_name: str | None = None,
        max_seconds: float | None = None,
        max_measurements: int | None = None,
        priority: int = 0,
        idempotency_key: str | None = None,
        **tuning: Unpack[TuneKeywords],
    ) -> JobView:
        """Submit a tuning job, and return it as it waits for a worker.

        It is sent again where no answer came, and stored once all the same.

        Args:
            model: "bert-encoder:tiny"; the path of a model file, which is sent along; or its content.
            preset: whose extents to start from.
            extents: elements along axes, in place of the preset's.
            options: of the model file, in place of its defaults.
            dtype: of inputs, parameters and activations.
            device: device type.
            device_name: of one device, as `devices` lists it; None for any of the type.
            max_seconds, max_measurements: the same as `limits` of `tuning`.
            priority: from -100 to 100, above 0 only for an admin; of jobs that wait, those of the highest are taken
                first.
            idempotency_key: under which one job is stored, whoever of this client's processes sends it, and however
                often; by default a new one.
            tuning: the fields of `autotuner.TuneOptions`, such as `gap=0.05` or `budget_bytes=2**30`.

        Raises:
            InputError: an option that is unknown, not valid or given twice.
            ModelError: a model file that cannot be used.
        """
        sent, preset = given_model(model, preset)
        given = tuning.pop("limits", None)
        if given is not None and (max_seconds, max_measurements) != (None, None):
            raise InputError("limits are given twice: give `limits`, or `max_seconds` and `max_measurements`")
        limits = asdict(given) if given else {"seconds": max_seconds, "measurements": max_measurements}
        body = checked(
            SubmittedJob, model=sent, preset=preset, extents=dict(extents or {}), options=dict(options or {}),
            dtype=dtype, device={"type": device, "name": device_name}, limits=limits, priority=priority, **tuning,
        )  # fmt: skip
        headers = {"Idempotency-Key": checked_key(idempotency_key or str(uuid4()))}
        left_out = {"numerics"} if body.numerics == "exact" else None  # which services before it do not know
        written = body.model_dump_json(exclude=left_out)
        found = self._transport.post("v1/jobs", written, headers=headers, repeatable=True)
        return self._transport.read(JobView, found)

    def jobs(self, *, state: JobStateName | None = None, limit: int | None = None) -> Iterator[JobView]:
        """Yield jobs, the newest first, at most `limit`."""
        return self._pages(JobPage, "v1/jobs", JobsQuery, "before", limit, state=state)

    def job(self, job_id: int) -> JobView:
        """Return a job."""
        return self._transport.read(JobView, self._transport.get(f"v1/jobs/{job_id}"))

    def cancel(self, job_id: int) -> JobView:
        """Cancel a job: one that waits ends at once, one that runs as soon as its worker has heard of it."""
        return self._transport.read(JobView, self._transport.post(f"v1/jobs/{job_id}/cancel", repeatable=True))

    def events(self, job_id: int, *, patience_s: float = PATIENCE_S) -> Iterator[JobView]:
        """Yield a job now and after each change, until it has ended.

        A connection that breaks off is opened again where it was (`Last-Event-ID`), so that no state comes twice. A
        service that is started anew is waited for; states that lie close together may come as one.

        Args:
            patience_s: for how long a service that cannot be reached is tried again.

        Raises:
            NotFoundError: there is no such job.
            ServiceError: the service stays away for longer.
        """
        last_id, revision = "", None
        for attempt in self._transport.retrying(seconds=patience_s):
            headers = {"Last-Event-ID": last_id} if last_id else {}
            opened = self._transport.stream(f"v1/jobs/{job_id}/events", headers)
            with attempt, self._transport.connected(attempt), opened as events:
                for event in events:
                    last_id = event.id
                    if not event.data:
                        continue
                    job = self._transport.read(JobView, event.data)
                    begin_anew(attempt)
                    if job.revision != revision:
                        revision = job.revision
                        yield job
                    if job.ended:
                        return
                raise ServiceError(f"{self.url} ended the events of job {job_id} before the job", passing=True)

    def wait(self, job_id: int, timeout_s: float | None = None, *, patience_s: float = PATIENCE_S) -> JobView:
        """Return a job once it has ended, however it ended.

        Raises:
            JobStateError: it has not ended after `timeout_s`; it goes on.
        """
        clock, retrying = self._transport.clock, self._transport.retrying(seconds=patience_s)
        deadline = None if timeout_s is None else clock.now() + timeout_s
        pause, longest = LOOK_S
        while True:
            job = retrying(self.job, job_id)
            if job.ended:
                return job
            if deadline is not None and clock.now() >= deadline:
                raise JobStateError(f"job {job_id} is {job.state} after {timeout_s} s: wait longer, or cancel it")
            clock.sleep(pause if deadline is None else max(0.0, min(pause, deadline - clock.now())))
            pause = min(longest, 2 * pause)

    # Configurations

    def best(
        self,
        model: GivenModel | None = None,
        *,
        family: str | None = None,
        preset: str | None = None,
        extents: Mapping[str, int] | None = None,
        options: Mapping[str, Scalar] | None = None,
        dtype: str | None = None,
        device: str = "cpu",
        device_name: str | None = None,
        budget_bytes: int | None = None,
        numerics: Numerics = "exact",
    ) -> BestView:
        """Return the best configuration that is known for a model on a device, and how good a match it is.

        Args:
            model: as in `submit`.
            family: in place of `model`, the family of a job; `extents` and `dtype` must then be given.
            device_name: None for any device of the type.
            budget_bytes: that it was tuned with; None for what was tuned without one.
            numerics: that it was tuned with.

        Raises:
            InputError: neither model nor family, or both.
        """
        query = best_query(
            model, family=family, preset=preset, extents=extents, options=options, dtype=dtype, device_type=device,
            device_name=device_name, budget_bytes=budget_bytes, numerics=numerics,
        )  # fmt: skip
        return self._transport.read(BestView, self._transport.get("v1/configurations/best", params(query)))

    def configuration(self, configuration_id: int) -> Configuration:
        """Return a configuration, ready for `autotuner.apply`.

        Raises:
            ConfigurationError: it is of another version of autotuner.
        """
        path = f"v1/configurations/{configuration_id}"
        view = self._transport.read(ConfigurationView, self._transport.get(path))
        return Configuration.from_json(view.configuration, f"{self.url}/{path}")

    def explain_operator(self, configuration_id: int, name: str) -> OperatorExplanation:
        """Return why an operator is computed as it is in a configuration, and what every other way would cost."""
        path = f"v1/configurations/{configuration_id}/operators/{quote(name, safe='')}"
        return self._transport.read(OperatorExplanation, self._transport.get(path))

    def explain_tensor(self, configuration_id: int, name: str) -> TensorExplanation:
        """Return in which forms a tensor exists in a configuration, and what other forms would cost."""
        path = f"v1/configurations/{configuration_id}/tensors/{quote(name, safe='')}"
        return self._transport.read(TensorExplanation, self._transport.get(path))

    # What is known

    def measurements(
        self,
        *,
        environment_key: str | None = None,
        device_type: str | None = None,
        signature: str | None = None,
        kernel: str | None = None,
        kinds: str | None = None,
        status: Status | None = None,
        limit: int | None = None,
    ) -> Iterator[MeasurementView]:
        """Yield what was measured, the first measured first, at most `limit`; a filter of None admits all.

        Args:
            kinds: of all operators of a call in their order, such as "contraction" or "bias+gelu_erf".
        """
        filters = {
            "environment_key": environment_key, "device_type": device_type, "signature": signature, "kernel": kernel,
            "kinds": kinds, "status": status,
        }  # fmt: skip
        return self._pages(MeasurementPage, "v1/measurements", MeasurementsQuery, "after", limit, **filters)

    def statistics(self, **filters: Any) -> StatisticsView:
        """Return how many measurements there are, by status, and how long they took; filters as in `measurements`."""
        query = checked(MeasurementsQuery, **filters, limit=1, statistics=True)
        page = self._transport.read(MeasurementPage, self._transport.get("v1/measurements", params(query)))
        assert page.statistics is not None
        return page.statistics

    def devices(self) -> list[DeviceView]:
        """Return the devices that somebody measured on, or for which a worker takes jobs."""
        return self._transport.read(list[DeviceView], self._transport.get("v1/devices"))

    def models(self) -> list[ModelView]:
        """Return the model files that the service has."""
        return self._transport.read(list[ModelView], self._transport.get("v1/models"))

    def health(self) -> Health:
        """Return how many jobs wait and run, and how many workers there are."""
        return self._transport.read(Health, self._transport.get("v1/healthz"))

    def _pages(
        self, kind: type[ListPage[T]], path: str, query: type[Query], cursor: str, limit: int | None, **filters: Any
    ) -> Iterator[T]:
        """Yield the items of page after page, at most `limit`; `cursor` is the parameter that begins the next page."""
        left, start = limit, None
        while left is None or left > 0:
            asked = checked(query, **filters, **{cursor: start}, limit=min(left or self.page_max, self.page_max))
            page = self._transport.read(kind, self._transport.get(path, params(asked)))
            yield from page.items
            if page.next is None:
                return
            start = page.next
            left = None if left is None else left - len(page.items)
