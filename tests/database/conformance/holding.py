"""Run by tests as a process of its own: takes something under a name, says what, and holds it until it is killed.

Usage:
    holding.py URL NAME lock        holds the lock
    holding.py URL NAME job         claims a job; prints its id and attempt
    holding.py URL NAME attended    runs a job of its own; prints the same
    holding.py URL NAME worker      is a worker
    holding.py URL NAME fork        holds the lock in a process that has forked another; prints the number of that one
    holding.py URL NAME drain       after a line of input, claims and finishes jobs until none waits; prints their ids
"""

import os
import sys
import time

from autotuner.database import open_database

XEON = [("cpu", "Xeon")]


def main(url: str, name: str, what: str) -> None:
    with open_database(url) as database, database.locks.hold(name):
        queue = database.queue
        if what == "drain":
            print("ready", flush=True)
            sys.stdin.readline()
            while jobs := queue.claim(name, XEON):
                print(jobs[0].id, flush=True)
                queue.finish(jobs[0].id, jobs[0].attempt, "finished")
            return
        if what == "job":
            (job,) = queue.claim(name, XEON)
            print(job.id, job.attempt, flush=True)
        elif what == "attended":
            begun = queue.begin(model="m:p", request={}, device_type="cpu", device_name="Xeon", runner=name)
            print(begun.id, begun.attempt, flush=True)
        elif what == "fork":
            child = os.fork()
            if child:
                print(child, flush=True)
        else:
            queue.greet(name, "cpu", "Xeon")
            print(name, flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
