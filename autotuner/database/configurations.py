"""Configurations in SQL: answers, found by their request or by the model and device to run."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from math import log
from operator import itemgetter
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    RowMapping,
    Select,
    Text,
    case,
    cast,
    func,
    insert,
    literal,
    or_,
    select,
)
from sqlalchemy.orm import InstrumentedAttribute

from autotuner.database.contract import Configurations
from autotuner.database.retrying import retried
from autotuner.database.tables import ConfigurationRow, EnvironmentRow
from autotuner.database.transactions import Transactions
from autotuner.database.values import ListedConfiguration, Match, MatchStatus, StoredConfiguration
from autotuner.errors import NotFoundError
from autotuner.ir.records import digest


class SqlConfigurations(Configurations):
    """Configurations in a database."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    @retried
    def save(
        self,
        *,
        request_key: str,
        environment_key: str,
        family_key: str,
        dtype: str,
        extents: Mapping[str, int],
        complete: bool,
        document: Mapping[str, Any],
        total_us: float,
        measured_us: float | None = None,
    ) -> int:
        with self._transactions.writing() as connection:
            statement = insert(ConfigurationRow).values(
                request_key=request_key,
                environment_id=self._transactions.environment_id(connection, environment_key),
                family_key=family_key,
                dtype=dtype,
                extents=dict(extents),
                extents_key=extents_key(extents),
                complete=complete,
                document=dict(document),
                total_us=total_us,
                measured_us=measured_us,
                created_at=datetime.now(UTC),
            )
            return connection.execute(statement.returning(ConfigurationRow.id)).scalar_one()

    @retried
    def find(
        self, request_key: str, environment_key: str, *, complete: bool = True
    ) -> tuple[int, dict[str, Any]] | None:
        query = (
            select(ConfigurationRow.id, ConfigurationRow.document)
            .join(EnvironmentRow)
            .where(ConfigurationRow.request_key == request_key, EnvironmentRow.key == environment_key)
            .order_by(ConfigurationRow.id.desc())
            .limit(1)
        )
        if complete:
            query = query.where(ConfigurationRow.complete)
        with self._transactions.reading() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else (row.id, row.document)

    @retried
    def get(self, configuration_id: int) -> StoredConfiguration:
        with self._transactions.reading() as connection:
            row = connection.execute(_stored().where(ConfigurationRow.id == configuration_id)).one_or_none()
        if row is None:
            raise NotFoundError(f"{self._transactions.shown} has no configuration {configuration_id}")
        return _read(row)

    @retried
    def best(
        self, *, family_key: str, dtype: str, extents: Mapping[str, int], device_type: str, device_name: str | None
    ) -> Match:
        family = (ConfigurationRow.family_key == family_key) & (ConfigurationRow.dtype == dtype)
        same_type = EnvironmentRow.device_type == device_type
        here = same_type if device_name is None else same_type & (EnvironmentRow.device_name == device_name)
        with self._transactions.reading() as connection:
            found = _first(connection, family & _of(extents), case((here, 0), (same_type, 1), else_=2))
            if found is None:
                shape = _nearest(connection.execute(_shapes(family & here)).all(), extents)
                found = None if shape is None else _first(connection, family & here & _of(shape))
        if found is None:
            return Match("none")
        differs = [f"extents.{axis}" for axis, extent in extents.items() if found.extents[axis] != extent]
        if differs:
            return Match("near_shape", tuple(differs), found)
        asked = {"device_type": device_type, "device_name": device_name}
        differs = [name for name, value in asked.items() if value is not None and getattr(found, name) != value]
        alike: MatchStatus = "doubtful" if found.doubts else "exact"
        return Match("near_device" if differs else alike, tuple(differs), found)

    @retried
    def listed(self, search: str = "", *, limit: int, before: int | None = None) -> list[ListedConfiguration]:
        query = select(*_LISTED).join(EnvironmentRow).order_by(ConfigurationRow.id.desc()).limit(limit)
        if before is not None:
            query = query.where(ConfigurationRow.id < before)
        for word in search.split():
            query = query.where(or_(*(column.icontains(word, autoescape=True) for column in _SEARCHED)))
        with self._transactions.reading() as connection:
            return [_listed(row._mapping) for row in connection.execute(query)]

    @retried
    def known(self, family_key: str) -> list[tuple[str, str, dict[str, int]]]:
        ids = _latest(
            ConfigurationRow.family_key == family_key,
            EnvironmentRow.device_type, ConfigurationRow.dtype, ConfigurationRow.extents_key,
        )  # fmt: skip
        query = (
            select(EnvironmentRow.device_type, ConfigurationRow.dtype, ConfigurationRow.extents)
            .join(EnvironmentRow)
            .where(ConfigurationRow.id.in_(ids))
            .order_by(ConfigurationRow.id.desc())
        )
        with self._transactions.reading() as connection:
            return [(kind, dtype, extents) for kind, dtype, extents in connection.execute(query)]


_MODEL = ConfigurationRow.document["model"]
_PRESET = func.coalesce(_MODEL["preset"].as_string(), "")
_SEARCHED = (
    _MODEL["name"].as_string() + ":" + _PRESET,
    ConfigurationRow.dtype,
    EnvironmentRow.device_type,
    EnvironmentRow.device_name,
)
_CERTIFICATE = ConfigurationRow.document["certificate"]
_LISTED = (
    ConfigurationRow.id,
    _MODEL["name"].as_string().label("name"),
    _PRESET.label("preset"),
    ConfigurationRow.dtype,
    ConfigurationRow.extents,
    ConfigurationRow.complete,
    EnvironmentRow.device_type,
    EnvironmentRow.device_name,
    EnvironmentRow.key.label("environment_key"),
    ConfigurationRow.total_us,
    ConfigurationRow.measured_us,
    _CERTIFICATE["proven_gap"].as_float().label("proven_gap"),
    _CERTIFICATE["default_us"].as_float().label("default_us"),
    ConfigurationRow.document["memory"]["budget_bytes"].as_string().label("budget_bytes"),  # beyond 32 bits
    ConfigurationRow.created_at,
)


def _listed(row: RowMapping) -> ListedConfiguration:
    values = dict(row)
    name, preset, budget = values.pop("name"), values.pop("preset"), values.pop("budget_bytes")
    return ListedConfiguration(
        **values,
        model=f"{name}:{preset}" if preset else name,
        budget_bytes=None if budget is None else int(budget),
    )


def extents_key(extents: Mapping[str, int]) -> str:
    return digest(sorted(extents.items()))


def _stored() -> Select[*tuple[Any, ...]]:
    return select(
        ConfigurationRow.id,
        cast(ConfigurationRow.document, Text).label("text"),
        ConfigurationRow.document["doubts"].label("doubts"),
        ConfigurationRow.dtype,
        ConfigurationRow.extents,
        ConfigurationRow.complete,
        EnvironmentRow.device_type,
        EnvironmentRow.device_name,
        EnvironmentRow.key.label("environment_key"),
        ConfigurationRow.total_us,
        ConfigurationRow.measured_us,
        ConfigurationRow.created_at,
    ).join(EnvironmentRow)


def _read(row: Row[*tuple[Any, ...]]) -> StoredConfiguration:
    doubts = tuple(doubt["sentence"] for doubt in row.doubts or ())  # none in those of earlier versions
    return StoredConfiguration(**{**row._mapping, "doubts": doubts})


def _of(extents: Mapping[str, int]) -> ColumnElement[bool]:
    return ConfigurationRow.extents_key == extents_key(extents)


def _first(
    connection: Connection, where: ColumnElement[bool], rank: ColumnElement[int] | None = None
) -> StoredConfiguration | None:
    """Return the one of least rank, then a complete one, then the latest; the documents of the others stay unread."""
    order = (literal(0) if rank is None else rank, ConfigurationRow.complete.desc(), ConfigurationRow.id.desc())
    found = connection.execute(
        select(ConfigurationRow.id).join(EnvironmentRow).where(where).order_by(*order).limit(1)
    ).scalar_one_or_none()
    return None if found is None else _read(connection.execute(_stored().where(ConfigurationRow.id == found)).one())


def _latest(where: ColumnElement[bool], *each: InstrumentedAttribute[str]) -> Select[int]:
    """Select the id of the latest configuration for each value of some columns."""
    return select(func.max(ConfigurationRow.id)).join(EnvironmentRow).where(where).group_by(*each)


def _shapes(where: ColumnElement[bool]) -> Select[int, dict[str, int]]:
    """Select the extents that configurations have, each once, with the latest that has them."""
    latest = _latest(where, ConfigurationRow.extents_key)
    return select(ConfigurationRow.id, ConfigurationRow.extents).where(ConfigurationRow.id.in_(latest))


def _nearest(shapes: Iterable[Row[int, dict[str, int]]], extents: Mapping[str, int]) -> dict[str, int] | None:
    """Return the extents of the same axes by the least sum of |log| of their ratios, of equal ones the latest."""
    ranked = [
        (sum(abs(log(found[axis] / extent)) for axis, extent in extents.items()), -number, found)
        for number, found in shapes
        if found.keys() == extents.keys()
    ]
    return min(ranked, key=itemgetter(0, 1))[2] if ranked else None
