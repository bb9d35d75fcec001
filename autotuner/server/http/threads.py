"""Threads, apart by what may hold them, so that what waits for the database's write lock holds nobody else.

Together they are the 15 connections that an engine opens, so that no request waits for one in vain.
"""

READERS = 8
WRITERS = 3
CHECKERS = 2
"""Of what is submitted, which takes the processor."""

PROBES = 1
WATCHERS = 1
