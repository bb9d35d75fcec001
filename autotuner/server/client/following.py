"""Following a job: its server-sent events as a generator that outlives lost connections and a restarted service."""

from collections.abc import Iterator
from time import monotonic

from autotuner.errors import ServiceError
from autotuner.server.client.transport import LONGEST_PAUSE_S, Patience, Transport
from autotuner.server.wire import JobView


def follow(transport: Transport, job_id: int, patience_s: float) -> Iterator[JobView]:
    """Yield a job now and after each change, until it has ended.

    A connection that breaks off is opened again where it was (`Last-Event-ID`), so that no state comes twice; states
    that lie close together may come as one.

    Args:
        patience_s: for how long a service that cannot be reached is tried again.

    Raises:
        NotFoundError: there is no such job.
        ServiceError: the service stays away for longer.
    """
    patience = Patience(seconds=patience_s)
    last_id, revision = "", None
    while True:
        opened_at = monotonic()
        headers = {"Last-Event-ID": last_id} if last_id else {}
        try:
            with transport.stream(f"v1/jobs/{job_id}/events", headers) as events:
                for event in events:
                    last_id = event.id
                    if not event.data:
                        continue
                    job = transport.read(JobView, event.data)
                    patience.succeed()
                    if job.revision != revision:
                        revision = job.revision
                        yield job
                    if job.ended:
                        return
            raise ServiceError(f"{transport.shown} ended the events of job {job_id} before the job", passing=True)
        except ServiceError as error:
            if monotonic() - opened_at > LONGEST_PAUSE_S:
                patience.succeed()  # it was connected meanwhile, and nothing happened to the job
            patience.wait(error)
