"""Database: what was measured and decided, kept in SQL; values in, values out.

SQLite is the embedded default (one file, many processes), PostgreSQL the database at scale; the same queries run on
both. No row, session or connection leaves this room.
"""

from autotuner.database.access import Database, Filter, Measured, Statistics, open_database
from autotuner.database.configurations import Match, MatchStatus, Stored
from autotuner.database.job import ENDED, Job, JobState, Worker
from autotuner.database.owner import this_process
from autotuner.database.patience import SERVING, WORKING, Patience, exit_in_hand
from autotuner.database.queue import JobQueue

__all__ = [
    "ENDED",
    "SERVING",
    "WORKING",
    "Database",
    "Filter",
    "Job",
    "JobQueue",
    "JobState",
    "Match",
    "MatchStatus",
    "Measured",
    "Patience",
    "Statistics",
    "Stored",
    "Worker",
    "exit_in_hand",
    "open_database",
    "this_process",
]
