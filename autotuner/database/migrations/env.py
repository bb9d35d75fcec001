"""The script that Alembic runs: the migrations, on the connection and in the transaction that it is given."""

from alembic import context

from autotuner.database.migrations import VERSION_TABLE
from autotuner.database.tables import Tables

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Tables.metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,  # SQLite alters a table by copying it
)
context.run_migrations()
