"""Summaries of jobs, keys and sizes of their requests, which need no documents; the memory of a worker's device."""

from hashlib import sha256

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

INDEX = "ix_job_client_created_at_request_bytes"
AT_ONCE = 100


def upgrade() -> None:
    op.add_column("job", sa.Column("request_key", sa.String(64), nullable=False, server_default=""))
    op.add_column("job", sa.Column("request_bytes", sa.Integer, nullable=False, server_default="0"))
    op.add_column("job", sa.Column("summary", sa.JSON))
    op.add_column("worker", sa.Column("memory_bytes", sa.BigInteger))
    op.create_index(INDEX, "job", ["client", "created_at", "request_bytes"])
    connection, last = op.get_bind(), 0
    query = sa.text("SELECT id, CAST(request AS TEXT) FROM job WHERE id > :last ORDER BY id LIMIT :number")
    statement = sa.text("UPDATE job SET request_key = :key, request_bytes = :bytes WHERE id = :id")
    while rows := connection.execute(query, {"last": last, "number": AT_ONCE}).all():
        for number, request in rows:
            given = {"key": sha256(request.encode()).hexdigest(), "bytes": len(request.encode()), "id": number}
            connection.execute(statement, given)
            last = number


def downgrade() -> None:
    op.drop_index(INDEX, "job")
    op.drop_column("worker", "memory_bytes")
    for name in ("summary", "request_bytes", "request_key"):
        op.drop_column("job", name)
