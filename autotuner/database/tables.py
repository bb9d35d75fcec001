"""The tables as SQLAlchemy models, and inserts into them. Migrations make the tables; a test holds the two equal.

Keys are sha256 in hex; times of day are in UTC. JSON is kept as text with its order (not as PostgreSQL's `jsonb`), so
that values come back exactly as they went in, floats included.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    ColumnElement,
    Connection,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

MESSAGE_MAX = 10_000
"""Of a longer message, the first and the last half of so many characters are kept."""

KEY = String(64)
NUMBER = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows by itself only where the type is INTEGER
NAMES = {
    "pk": "pk_%(table_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
}


class Utc(TypeDecorator[datetime]):
    """A time of day in UTC; SQLite would forget the zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        return value.astimezone(UTC) if value else None

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Message(TypeDecorator[str]):
    """A text that any database can keep: a failure's own words never stop it from being stored, nor fill the disk."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002
        if value and len(value) > MESSAGE_MAX:
            half = MESSAGE_MAX // 2
            value = f"{value[:half]} ... {value[-half:]}"
        return value and value.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")


class Tables(DeclarativeBase):
    """The base of all tables: how Python's types and the names of constraints are written in SQL."""

    metadata = MetaData(naming_convention=NAMES)
    type_annotation_map = {  # noqa: RUF012 (read by SQLAlchemy, never changed)
        str: Text,
        float: Double,
        datetime: Utc,
        dict[str, Any]: JSON,
        list[float]: JSON,
        list[str]: JSON,
    }


class EnvironmentRow(Tables):
    __tablename__ = "environment"
    __table_args__ = (UniqueConstraint("key"),)

    id: Mapped[int] = mapped_column(NUMBER, primary_key=True)
    key: Mapped[str] = mapped_column(KEY)
    device_type: Mapped[str]
    device_name: Mapped[str]
    facts: Mapped[dict[str, Any]]
    policy: Mapped[dict[str, Any]]


class MeasurementRow(Tables):
    """The outcome of a call in an environment; signature, kernel and kinds repeat what `call` says, for filtering."""

    __tablename__ = "measurement"
    __table_args__ = (
        UniqueConstraint("call_key", "environment_id"),
        Index(None, "environment_id"),  # in the order of `id`: a page needs no sorting
        Index(None, "environment_id", "status"),
        Index(None, "signature"),
        CheckConstraint("(status = 'ok') = (median_us IS NOT NULL)", name="ok_has_a_time"),
    )

    id: Mapped[int] = mapped_column(NUMBER, primary_key=True)
    call_key: Mapped[str] = mapped_column(KEY)
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    signature: Mapped[str] = mapped_column(KEY)
    kernel: Mapped[str]
    kinds: Mapped[str]
    call: Mapped[dict[str, Any]]
    status: Mapped[str] = mapped_column(String(16))
    median_us: Mapped[float | None]
    low_us: Mapped[float | None]
    high_us: Mapped[float | None]
    samples_us: Mapped[list[float]]
    workspace_bytes: Mapped[int] = mapped_column(BigInteger)
    message: Mapped[str] = mapped_column(Message)
    measured_at: Mapped[datetime]
    marks: Mapped[list[str]] = mapped_column(server_default="[]")


class JobRow(Tables):
    """A job; the key of its request is that of the text, the summary what lists tell of it."""

    __tablename__ = "job"
    __table_args__ = (
        Index(None, "state"),
        Index(None, "client", "created_at", "request_bytes"),  # what a client has submitted, without its documents
        UniqueConstraint("client", "idempotency_key"),
    )

    id: Mapped[int] = mapped_column(NUMBER, primary_key=True)
    model: Mapped[str]
    request: Mapped[dict[str, Any]]
    device_type: Mapped[str]
    device_name: Mapped[str | None]
    attended: Mapped[bool]
    state: Mapped[str] = mapped_column(String(16))
    cancelling: Mapped[bool]
    worker: Mapped[str | None]
    attempt: Mapped[int] = mapped_column(server_default="0")
    losses: Mapped[int] = mapped_column(server_default="0")
    priority: Mapped[int] = mapped_column(server_default="0")
    idempotency_key: Mapped[str | None]
    progress: Mapped[dict[str, Any]]
    revision: Mapped[int]
    counts: Mapped[dict[str, Any]]
    configuration_id: Mapped[int | None] = mapped_column(ForeignKey("configuration.id"))
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    message: Mapped[str] = mapped_column(Message)
    client: Mapped[str] = mapped_column(server_default="")
    request_key: Mapped[str] = mapped_column(KEY, server_default="")
    request_bytes: Mapped[int] = mapped_column(server_default="0")
    summary: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class WorkerRow(Tables):
    __tablename__ = "worker"

    name: Mapped[str] = mapped_column(primary_key=True)
    device_type: Mapped[str]
    device_name: Mapped[str]
    started_at: Mapped[datetime]
    memory_bytes: Mapped[int | None] = mapped_column(BigInteger)


class GpuRow(Tables):
    """A GPU of a fleet as one of its jobs, or its runner, saw it last."""

    __tablename__ = "gpu"

    runner: Mapped[str] = mapped_column(primary_key=True)
    slot: Mapped[str] = mapped_column(primary_key=True)
    host: Mapped[str]
    uuid: Mapped[str]
    device_type: Mapped[str]
    device_name: Mapped[str]
    used: Mapped[bool]
    reason: Mapped[str] = mapped_column(Message)
    canary_us: Mapped[float | None]
    seen_at: Mapped[datetime]


class ConfigurationRow(Tables):
    """An answer; family, dtype and extents repeat what its document says, for finding it."""

    __tablename__ = "configuration"
    __table_args__ = (
        Index(None, "request_key", "environment_id"),
        Index(None, "family_key", "dtype", "extents_key"),
    )

    id: Mapped[int] = mapped_column(NUMBER, primary_key=True)
    request_key: Mapped[str] = mapped_column(KEY)
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    family_key: Mapped[str] = mapped_column(KEY)
    dtype: Mapped[str] = mapped_column(String(16))
    extents: Mapped[dict[str, Any]]
    extents_key: Mapped[str] = mapped_column(KEY)
    complete: Mapped[bool]
    document: Mapped[dict[str, Any]]
    total_us: Mapped[float]
    measured_us: Mapped[float | None]
    created_at: Mapped[datetime]


class TokenRow(Tables):
    """A token of a client of the service, of which only the digest is kept."""

    __tablename__ = "token"
    __table_args__ = (UniqueConstraint("digest"),)

    id: Mapped[int] = mapped_column(NUMBER, primary_key=True)
    digest: Mapped[str] = mapped_column(KEY)
    name: Mapped[str]
    role: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class FactRow(Tables):
    """A constant that was measured once for an environment, such as its noise floor."""

    __tablename__ = "fact"

    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float]
    measured_at: Mapped[datetime]


def insert_into(connection: Connection, table: type[Tables]) -> postgresql.Insert | sqlite.Insert:
    """Return an insert of either dialect that has `on_conflict_do_nothing` and `on_conflict_do_update`."""
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


def upsert(
    connection: Connection, table: type[Tables], unique: tuple[str, ...], *, where: ColumnElement[bool] | None = None
) -> postgresql.Insert | sqlite.Insert:
    """Return an insert that overwrites the row with the same unique columns, if `where` holds for that row."""
    statement = insert_into(connection, table)
    given = {column.name: column for column in statement.excluded if column.name not in (*unique, "id")}
    return statement.on_conflict_do_update(index_elements=unique, set_=given, where=where)
