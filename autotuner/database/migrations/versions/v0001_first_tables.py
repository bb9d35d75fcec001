"""First tables: environment, measurement, claim, configuration, job, worker, fact."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

KEY = sa.String(64)
NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "environment",
        sa.Column("id", NUMBER, nullable=False),
        sa.Column("key", KEY, nullable=False),
        sa.Column("device_type", sa.Text, nullable=False),
        sa.Column("device_name", sa.Text, nullable=False),
        sa.Column("facts", sa.JSON, nullable=False),
        sa.Column("policy", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_environment"),
        sa.UniqueConstraint("key", name="uq_environment_key"),
    )
    op.create_table(
        "measurement",
        sa.Column("id", NUMBER, nullable=False),
        sa.Column("call_key", KEY, nullable=False),
        _environment("measurement"),
        sa.Column("signature", KEY, nullable=False),
        sa.Column("kernel", sa.Text, nullable=False),
        sa.Column("kinds", sa.Text, nullable=False),
        sa.Column("call", sa.JSON, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("median_us", sa.Double),
        sa.Column("low_us", sa.Double),
        sa.Column("high_us", sa.Double),
        sa.Column("samples_us", sa.JSON, nullable=False),
        sa.Column("workspace_bytes", sa.BigInteger, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("measured_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_measurement"),
        sa.UniqueConstraint("call_key", "environment_id", name="uq_measurement_call_key_environment_id"),
        sa.CheckConstraint("(status = 'ok') = (median_us IS NOT NULL)", name=op.f("ck_measurement_ok_has_a_time")),
    )
    op.create_index("ix_measurement_environment_id", "measurement", ["environment_id"])
    op.create_index("ix_measurement_environment_id_status", "measurement", ["environment_id", "status"])
    op.create_index("ix_measurement_signature", "measurement", ["signature"])
    op.create_table(
        "claim",
        _environment("claim"),
        sa.Column("call_key", KEY, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("lease_until", TIME, nullable=False),
        sa.PrimaryKeyConstraint("environment_id", "call_key", name="pk_claim"),
    )
    op.create_table(
        "configuration",
        sa.Column("id", NUMBER, nullable=False),
        sa.Column("request_key", KEY, nullable=False),
        _environment("configuration"),
        sa.Column("family_key", KEY, nullable=False),
        sa.Column("dtype", sa.String(16), nullable=False),
        sa.Column("extents", sa.JSON, nullable=False),
        sa.Column("extents_key", KEY, nullable=False),
        sa.Column("complete", sa.Boolean, nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Column("total_us", sa.Double, nullable=False),
        sa.Column("measured_us", sa.Double),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_configuration"),
    )
    op.create_index("ix_configuration_request_key_environment_id", "configuration", ["request_key", "environment_id"])
    op.create_index(
        "ix_configuration_family_key_dtype_extents_key", "configuration", ["family_key", "dtype", "extents_key"]
    )
    op.create_table(
        "job",
        sa.Column("id", NUMBER, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("device_type", sa.Text, nullable=False),
        sa.Column("device_name", sa.Text),
        sa.Column("attended", sa.Boolean, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("cancelling", sa.Boolean, nullable=False),
        sa.Column("worker", sa.Text),
        sa.Column("lease_until", TIME),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("progress", sa.JSON, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("counts", sa.JSON, nullable=False),
        sa.Column("configuration_id", NUMBER, sa.ForeignKey("configuration.id", name="fk_job_configuration_id")),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("started_at", TIME),
        sa.Column("finished_at", TIME),
        sa.Column("message", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_job"),
    )
    op.create_index("ix_job_state", "job", ["state"])
    op.create_table(
        "worker",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("device_type", sa.Text, nullable=False),
        sa.Column("device_name", sa.Text, nullable=False),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("seen_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_worker"),
    )
    op.create_table(
        "fact",
        _environment("fact"),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("value", sa.Double, nullable=False),
        sa.Column("measured_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("environment_id", "name", name="pk_fact"),
    )


def downgrade() -> None:
    for table in ("fact", "worker", "job", "configuration", "claim", "measurement", "environment"):
        op.drop_table(table)


def _environment(table: str) -> "sa.Column[int]":
    reference = sa.ForeignKey("environment.id", name=f"fk_{table}_environment_id")
    return sa.Column("environment_id", NUMBER, reference, nullable=False)
