"""Database: what was measured and decided, kept in SQL; values in, values out.

SQLite is the embedded default (one file, many processes), PostgreSQL the database at scale; the same queries run on
both. No row, session or connection leaves this room.
"""

from autotuner.database.access import Database, open_database
from autotuner.database.job import Job, JobState

__all__ = ["Database", "Job", "JobState", "open_database"]
