"""Database: measurements, answers, jobs and workers, kept in SQL; values in, values out.

SQLite is the embedded default (one file, many processes), PostgreSQL the database at scale; the same queries run on
both. `contract` says what other packages may rely on. No row, session or connection leaves this package.
"""

from autotuner.database.contract import Device, Queue, Storage
from autotuner.database.database import Database, open_database, upgraded
from autotuner.database.exporting import results_file
from autotuner.database.importing import import_measurements
from autotuner.database.inventory import Inventory
from autotuner.database.locks import Hold, Locks
from autotuner.database.pruning import Pruned, matching
from autotuner.database.retrying import SERVING, WORKING, Timeouts, exit_in_hand
from autotuner.database.tokens import PREFIX, ROLES, Role, SqlTokens, Token
from autotuner.database.values import (
    ENDED,
    Answer,
    Filter,
    FleetGpu,
    Job,
    JobState,
    Match,
    MatchStatus,
    Statistics,
    StoredConfiguration,
    StoredMeasurement,
    Worker,
)

__all__ = [
    "ENDED",
    "PREFIX",
    "ROLES",
    "SERVING",
    "WORKING",
    "Answer",
    "Database",
    "Device",
    "Filter",
    "FleetGpu",
    "Hold",
    "Inventory",
    "Job",
    "JobState",
    "Locks",
    "Match",
    "MatchStatus",
    "Pruned",
    "Queue",
    "Role",
    "SqlTokens",
    "Statistics",
    "Storage",
    "StoredConfiguration",
    "StoredMeasurement",
    "Timeouts",
    "Token",
    "Worker",
    "exit_in_hand",
    "import_measurements",
    "matching",
    "open_database",
    "results_file",
    "upgraded",
]
