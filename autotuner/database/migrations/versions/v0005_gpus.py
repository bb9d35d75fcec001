"""GPUs of a fleet, and why some take no part."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "gpu",
        sa.Column("runner", sa.Text, nullable=False),
        sa.Column("slot", sa.Text, nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("uuid", sa.Text, nullable=False),
        sa.Column("device_type", sa.Text, nullable=False),
        sa.Column("device_name", sa.Text, nullable=False),
        sa.Column("used", sa.Boolean, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("canary_us", sa.Double),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("runner", "slot", name="pk_gpu"),
    )


def downgrade() -> None:
    op.drop_table("gpu")
