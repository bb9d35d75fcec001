"""Migrations, run from `autotuner.database.migrating`; a new one also moves `HEAD` there."""
