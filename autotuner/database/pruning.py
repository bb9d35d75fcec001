"""Pruning: jobs that ended long ago, and measurements of environments that nobody uses any more."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, and_, delete, func, select

from autotuner.database.retrying import retried
from autotuner.database.tables import ConfigurationRow, EnvironmentRow, FactRow, JobRow, MeasurementRow
from autotuner.database.transactions import Transactions
from autotuner.database.values import ENDED
from autotuner.errors import NotFoundError

CHUNK = 10_000
"""Rows that are removed in one transaction: whoever writes meanwhile waits for no more."""


@dataclass(frozen=True, slots=True)
class Unused:
    """An environment whose measurements can go.

    Args:
        last_used: when something was last measured, answered or asked for in it; None for never.
        measurements: their number.
    """

    key: str
    device_type: str
    device_name: str
    last_used: datetime | None
    measurements: int


@dataclass(frozen=True, slots=True)
class Pruned:
    """Number of jobs and environments that can be removed, or were.

    Args:
        jobs: the number of those that have ended; their answers stay.
        environments: those whose measurements and facts go; their answers stay.
    """

    jobs: int
    environments: tuple[Unused, ...]


class SqlPruning:
    """Removes what has no use; answers are never removed."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    @retried
    def find(
        self,
        *,
        jobs_before: datetime | None = None,
        unused_since: datetime | None = None,
        environment_keys: Collection[str] = (),
    ) -> Pruned:
        """Return what could be removed.

        Args:
            jobs_before: jobs that ended before.
            unused_since: environments that nobody has used since.
            environment_keys: environments whatever their use, by the first characters of their keys.

        Raises:
            NotFoundError: no environment has such a key, or several have.
        """
        with self._transactions.reading() as connection:
            jobs = 0
            if jobs_before is not None:
                count = select(func.count()).select_from(JobRow).where(_ended(jobs_before))
                jobs = connection.execute(count).scalar_one()
            found = self._environments(connection)
        named = {matching(key, [each.key for each in found]) for key in environment_keys}
        old = {each.key for each in found if unused_since is not None and _is_old(each, unused_since)}
        return Pruned(
            jobs, tuple(each for each in found if each.key in named or (each.key in old and each.measurements))
        )

    def remove(self, found: Pruned, jobs_before: datetime | None = None) -> None:
        """Remove what `find` has found."""
        if jobs_before is not None:
            while self._remove(JobRow, _ended(jobs_before)):
                pass
        for environment in found.environments:
            of_it = select(EnvironmentRow.id).where(EnvironmentRow.key == environment.key).scalar_subquery()
            while self._remove(MeasurementRow, MeasurementRow.environment_id == of_it):
                pass
            self._forget(environment.key)

    @retried
    def _remove(self, table: type[JobRow] | type[MeasurementRow], which: ColumnElement[bool]) -> int:
        """Remove some rows, and return how many."""
        some = select(table.id).where(which).order_by(table.id).limit(CHUNK)
        with self._transactions.writing() as connection:
            return connection.execute(delete(table).where(table.id.in_(some))).rowcount

    @retried
    def _forget(self, key: str) -> None:
        of_it = select(EnvironmentRow.id).where(EnvironmentRow.key == key).scalar_subquery()
        with self._transactions.writing() as connection:
            connection.execute(delete(FactRow).where(FactRow.environment_id == of_it))

    @staticmethod
    def _environments(connection: Connection) -> list[Unused]:
        measured = (
            select(
                MeasurementRow.environment_id.label("id"),
                func.count().label("number"),
                func.max(MeasurementRow.measured_at).label("at"),
            )
            .group_by(MeasurementRow.environment_id)
            .subquery()
        )
        answered = (
            select(
                ConfigurationRow.environment_id.label("id"),
                func.max(ConfigurationRow.created_at).label("at"),
                func.max(JobRow.created_at).label("asked"),
            )
            .outerjoin(JobRow, JobRow.configuration_id == ConfigurationRow.id)
            .group_by(ConfigurationRow.environment_id)
            .subquery()
        )
        query = (
            select(
                EnvironmentRow.key,
                EnvironmentRow.device_type,
                EnvironmentRow.device_name,
                measured.c.number,
                measured.c.at.label("measured_at"),
                answered.c.at.label("answered_at"),
                answered.c.asked.label("asked_at"),
            )
            .outerjoin(measured, measured.c.id == EnvironmentRow.id)
            .outerjoin(answered, answered.c.id == EnvironmentRow.id)
            .order_by(EnvironmentRow.id)
        )
        return [
            Unused(
                row.key, row.device_type, row.device_name,
                max(filter(None, (row.measured_at, row.answered_at, row.asked_at)), default=None), row.number or 0,
            )
            for row in connection.execute(query)
        ]  # fmt: skip


def matching(text: str, keys: Collection[str]) -> str:
    """Return the one key that begins with a text.

    Raises:
        NotFoundError: none does, or several do.
    """
    found = [key for key in keys if text and key.startswith(text)]
    if len(found) != 1:
        what = "no environment's key begins" if not found else f"the keys of {len(found)} environments begin"
        known = ", ".join(sorted(key[:12] for key in keys)) or "none"
        raise NotFoundError(f"{what} with {text!r}; known: {known}")
    return found[0]


def _ended(before: datetime) -> ColumnElement[bool]:
    return and_(JobRow.state.in_(ENDED), JobRow.finished_at < before)


def _is_old(environment: Unused, since: datetime) -> bool:
    return environment.last_used is None or environment.last_used < since
