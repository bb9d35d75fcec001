"""GPUs of fleets: which take part, and why others do not, as the runners and their jobs have told."""

from collections.abc import Collection, Iterable
from dataclasses import asdict, fields
from datetime import UTC, datetime, timedelta

from sqlalchemy import delete, select, update

from autotuner.database.locks import Locks
from autotuner.database.retrying import retried
from autotuner.database.tables import GpuRow, upsert
from autotuner.database.transactions import Transactions
from autotuner.database.values import FleetGpu

GPU = [getattr(GpuRow, field.name) for field in fields(FleetGpu)]
FORGOTTEN_AFTER = timedelta(hours=1)
"""A GPU that takes no part is no longer shown when nobody has told of it for so long, and somebody tells of others."""

HOST_GONE = "its host is gone"


class SqlGpus:
    """GPUs in a database, by the runner of their fleet and their slot."""

    def __init__(self, transactions: Transactions, locks: Locks) -> None:
        self._transactions, self._locks = transactions, locks

    @retried
    def report(self, runner: str, gpus: Iterable[FleetGpu]) -> None:
        """Store how GPUs of a runner's fleet are now."""
        now = datetime.now(UTC)
        rows = [{**asdict(gpu), "runner": runner, "seen_at": now} for gpu in gpus]
        old = (GpuRow.runner == runner) & GpuRow.used.is_(False) & (GpuRow.seen_at < now - FORGOTTEN_AFTER)
        with self._transactions.writing() as connection:
            connection.execute(delete(GpuRow).where(old))
            if rows:
                connection.execute(upsert(connection, GpuRow, ("runner", "slot")), rows)

    @retried
    def keep(self, runner: str, nodes: Collection[str], failing: Collection[FleetGpu]) -> None:
        """Note what a runner sees of its fleet between jobs.

        Args:
            nodes: that are there: the first part of a slot.
            failing: GPUs that do not say what they are.
        """
        with self._transactions.reading() as connection:
            known = connection.execute(select(*GPU).where(GpuRow.runner == runner)).all()
        gone = [row.slot for row in known if row.slot.partition("/")[0] not in nodes and row.reason != HOST_GONE]
        slots = {gpu.slot for gpu in failing}
        well = [row.slot for row in known if not row.device_name and row.slot not in slots]
        told = {(row.slot, row.reason) for row in known}
        if gone or well:
            own = GpuRow.runner == runner
            lost = {"used": False, "reason": HOST_GONE, "seen_at": datetime.now(UTC)}
            with self._transactions.writing() as connection:
                connection.execute(update(GpuRow).where(own, GpuRow.slot.in_(gone)).values(lost))
                connection.execute(delete(GpuRow).where(own, GpuRow.slot.in_(well)))
        if {(gpu.slot, gpu.reason) for gpu in failing} - told:
            self.report(runner, failing)

    @retried
    def forget(self, runner: str) -> None:
        """Remove the GPUs of a runner, and those of runners that are gone."""
        with self._transactions.writing() as connection:
            runners = set(connection.execute(select(GpuRow.runner).distinct()).scalars())
            gone = {runner, *self._locks.gone(runners, connection)}
            connection.execute(delete(GpuRow).where(GpuRow.runner.in_(gone)))

    @retried
    def all(self) -> list[FleetGpu]:
        """Return the GPUs of fleets whose runner is there, by host and slot."""
        with self._transactions.reading() as connection:
            rows = connection.execute(select(GpuRow.runner, *GPU).order_by(GpuRow.host, GpuRow.slot)).all()
            held = self._locks.held({row.runner for row in rows}, connection)
        found = [dict(row._mapping) for row in rows]
        return [FleetGpu(**row) for row in found if row.pop("runner") in held]
