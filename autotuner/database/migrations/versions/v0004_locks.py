"""Runners hold locks: leases and claims go; attempt, priority and idempotency key of a job come."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

KEY = sa.String(64)
NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    with op.batch_alter_table("job") as job:
        job.add_column(sa.Column("attempt", sa.Integer, nullable=False, server_default="0"))
        job.add_column(sa.Column("losses", sa.Integer, nullable=False, server_default="0"))
        job.add_column(sa.Column("priority", sa.Integer, nullable=False, server_default="0"))
        job.add_column(sa.Column("idempotency_key", sa.Text))
        job.create_unique_constraint("uq_job_client_idempotency_key", ["client", "idempotency_key"])
    op.execute("UPDATE job SET attempt = attempts, losses = CASE WHEN attempts > 0 THEN attempts - 1 ELSE 0 END")
    with op.batch_alter_table("job") as job:
        job.drop_column("attempts")
        job.drop_column("lease_until")
    op.drop_table("claim")
    op.execute("DELETE FROM worker")  # those of before hold no locks
    with op.batch_alter_table("worker") as worker:
        worker.drop_column("seen_at")


def downgrade() -> None:
    op.execute("DELETE FROM worker")
    with op.batch_alter_table("worker") as worker:
        worker.add_column(sa.Column("seen_at", TIME, nullable=False))
    op.create_table(
        "claim",
        sa.Column(
            "environment_id", NUMBER, sa.ForeignKey("environment.id", name="fk_claim_environment_id"), nullable=False
        ),
        sa.Column("call_key", KEY, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("lease_until", TIME, nullable=False),
        sa.PrimaryKeyConstraint("environment_id", "call_key", name="pk_claim"),
    )
    with op.batch_alter_table("job") as job:
        job.add_column(sa.Column("attempts", sa.Integer, nullable=False, server_default="0"))
        job.add_column(sa.Column("lease_until", TIME))
        job.drop_constraint("uq_job_client_idempotency_key", type_="unique")
        job.drop_column("idempotency_key")
        job.drop_column("priority")
        job.drop_column("losses")
        job.drop_column("attempt")
