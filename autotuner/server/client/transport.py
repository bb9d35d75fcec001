"""Transport: requests to one service, tried again where that is safe, and its refusals as errors of the tree."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from random import uniform
from time import monotonic, sleep
from typing import Any, TypeVar

import httpx2
from pydantic import TypeAdapter, ValidationError
from tenacity import AttemptManager, RetryCallState, Retrying, retry_if_exception, wait_exponential

from autotuner.errors import AutotunerError, InputError, JobStateError, ModelError, NotFoundError, ServiceError
from autotuner.server.wire.responses import ProblemDetails
from autotuner.settings import server_url

LONGEST_PAUSE_S = 5.0
PAUSES = wait_exponential(0.25, max=LONGEST_PAUSE_S)
PASSING = (502, 503, 504)
"""Statuses of a service, or a proxy before it, that cannot answer now."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")
Params = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Clock:
    """The time in seconds, and pauses; tests have one of their own."""

    now: Callable[[], float] = monotonic
    sleep: Callable[[float], None] = sleep


class Transport:
    """Requests to one service.

    Args:
        url: of the service.
        timeout_s: for connecting, and for each wait for more of an answer.
        retries: how often a question is asked again that found no service.
        transport: carries the requests in place of the network.
        token: sent with each request; None for none.

    Raises:
        InputError: `url` is no URL of a service.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        retries: int,
        transport: httpx2.BaseTransport | None,
        clock: Clock,
        token: str | None = None,
    ) -> None:
        if not timeout_s > 0 or retries < 0:
            raise InputError(f"timeout_s is {timeout_s} and retries {retries}: give a time above 0, and retries from 0")
        base = server_url(url)
        try:
            parsed = httpx2.URL(base)
        except httpx2.InvalidURL as error:
            raise InputError(f"the URL of the service cannot be used: {error}") from error
        self.shown = str(parsed.copy_with(userinfo=b"")) if parsed.userinfo else base
        self._retries, self.clock = retries, clock
        self._client = httpx2.Client(
            base_url=base,
            timeout=timeout_s,
            transport=transport,
            # A proxy of the environment does not reach a service on this machine.
            trust_env=parsed.host not in LOOPBACK,
            headers={"User-Agent": "autotuner", "Accept": "application/json", **_authorization(token)},
        )

    def close(self) -> None:
        self._client.close()

    def retrying(
        self, *, tries: float = inf, seconds: float = inf, when: Callable[[ServiceError], bool] = lambda _: True
    ) -> Retrying:
        """Return retries of what fails with an error that may pass, behind pauses that double, up to 5 s, with jitter.

        Args:
            tries: the number of retries.
            seconds: the time since the first failure, or since the first after `begin_anew`.
            when: which of these errors are tried again.
        """
        since = 0.0

        def are_over(state: RetryCallState) -> bool:
            nonlocal since
            now = self.clock.now()
            since = now if state.attempt_number == 1 else since
            return state.attempt_number > tries or now - since >= seconds

        return Retrying(
            sleep=self.clock.sleep,
            stop=are_over,
            wait=lambda state: uniform(0.5, 1) * PAUSES(state),
            retry=retry_if_exception(lambda error: isinstance(error, ServiceError) and error.passing and when(error)),
            reraise=True,
        )

    def get(self, path: str, params: Params | None = None) -> httpx2.Response:
        """Ask, and ask again where no service was found.

        Returns:
            A response that is a success.

        Raises:
            NotFoundError, JobStateError, InputError: the service refuses, in its own words.
            ServiceError: it cannot be reached, or failed.
        """
        # Of a read timeout, somebody is there and does not answer: that was waited for long enough.
        retrying = self.retrying(
            tries=self._retries, when=lambda error: not isinstance(error.__cause__, httpx2.ReadTimeout)
        )
        return retrying(self._send, "GET", path, params=params)

    def post(
        self,
        path: str,
        body: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        repeatable: bool = False,
    ) -> httpx2.Response:
        """Send something once; again only if it cannot have arrived, or if it may arrive twice.

        Args:
            body: JSON.
            repeatable: the second of two equal requests changes nothing.

        Raises:
            As `get`.
        """
        headers = dict(headers or {}) | ({} if body is None else {"Content-Type": "application/json"})
        unsent = httpx2.ConnectError, httpx2.ConnectTimeout
        retrying = self.retrying(
            tries=self._retries, when=lambda error: repeatable or isinstance(error.__cause__, unsent)
        )
        return retrying(self._send, "POST", path, content=body, headers=headers)

    @contextmanager
    def connected(self, attempt: AttemptManager) -> Iterator[None]:
        """Begin retries anew where an attempt fails after more than 5 s: it was connected meanwhile."""
        opened_at = self.clock.now()
        try:
            yield
        except ServiceError:
            if self.clock.now() - opened_at > LONGEST_PAUSE_S:
                begin_anew(attempt)
            raise

    @contextmanager
    def stream(self, path: str, headers: Mapping[str, str]) -> Iterator[httpx2.EventSource]:
        """Open a stream of server-sent events.

        Raises:
            As `get`; a `ServiceError` also where the stream breaks off.
        """
        try:
            with self._client.stream("GET", path, headers={**headers, "Accept": "text/event-stream"}) as response:
                if response.status_code != 200:
                    response.read()
                    raise self._refusal(response)
                yield httpx2.EventSource(response)
        except httpx2.SSEError as error:
            raise self._strange(str(error)) from error
        except httpx2.TransportError as error:
            raise self._unreachable(error) from error

    def read(self, kind: type[T], response: httpx2.Response | str) -> T:
        """Return the body of a response as a value.

        Raises:
            ServiceError: it is no such value.
        """
        text = response if isinstance(response, str) else response.text
        try:
            return TypeAdapter(kind).validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise self._strange(f"{where + ': ' if where else ''}{first['msg']}") from error

    def _send(self, method: str, path: str, **request: Any) -> httpx2.Response:
        try:
            response = self._client.request(method, path, **request)
        except httpx2.TransportError as error:
            raise self._unreachable(error) from error
        except (httpx2.DecodingError, httpx2.TooManyRedirects) as error:
            raise self._strange(str(error)) from error
        if response.is_success:
            return response
        raise self._refusal(response)

    def _refusal(self, response: httpx2.Response) -> AutotunerError:
        """Return what a response that is no success means: the service's own sentence, as an error of the tree."""
        status = response.status_code
        try:
            problem = ProblemDetails.model_validate_json(response.text)
        except ValidationError:
            if status in PASSING:
                return ServiceError(f"the service at {self.shown} cannot answer now (status {status})", passing=True)
            return self._strange(f"status {status} for {response.request.url.path}, without saying why")
        fields = list(_fields(problem))
        detail = problem.detail.rstrip(".")
        more = re.search(r"; and (\d+) more$", detail)
        if more is not None and int(more[1]) <= len(fields):
            detail = detail[: more.start()]  # they follow
        said = "; ".join([detail, *fields])
        if status == 404:
            return NotFoundError(said)
        if status == 409:  # what is asked for is well formed, and cannot be had of this job, or of this model
            return (JobStateError if "/v1/jobs/" in response.request.url.path else ModelError)(said)
        if 400 <= status < 500 and status not in (401, 403, 408, 429):
            return InputError(said)
        if status == 401:
            said += "; a client sends AUTOTUNER_TOKEN, or what the file AUTOTUNER_TOKEN_FILE holds"
        does = "refuses" if status in (401, 403, 429) else "failed"
        passing = status in PASSING or (status == 429 and response.request.method == "GET")
        return ServiceError(f"the service at {self.shown} {does}: {said} (status {status})", passing=passing)

    def _unreachable(self, error: httpx2.TransportError) -> ServiceError:
        what = str(error) or type(error).__name__
        return ServiceError(
            f"no service answers at {self.shown} ({what}): start one with `autotuner serve`, or name another with "
            "--server or AUTOTUNER_SERVER",
            passing=True,
        )

    def _strange(self, what: str) -> ServiceError:
        return ServiceError(
            f"what answers at {self.shown} is no autotuner service of this version ({what}): see `autotuner serve`"
        )


def begin_anew(attempt: AttemptManager) -> None:
    """Count an attempt as the first one: what was tried has worked."""
    attempt.retry_state.attempt_number = 1


def _authorization(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _fields(problem: ProblemDetails) -> Iterator[str]:
    """Yield which fields of a request are not valid, those that the detail does not name itself."""
    for error in problem.errors or ():
        name, text = str(error.get("field", error.get("loc", ""))), str(error.get("message", error.get("msg", "")))
        if name and name not in problem.detail:
            yield f"{name}: {text}"
