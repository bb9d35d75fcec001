"""Marks of measurements: under which conditions they came about."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("measurement", sa.Column("marks", sa.JSON, nullable=False, server_default="[]"))


def downgrade() -> None:
    op.drop_column("measurement", "marks")
