"""Run by tests as a process of its own: takes something, says what, and holds it until it is killed.

Usage:
    holding.py URL job              claims a job; prints its own name and the job's id
    holding.py URL attended         runs a job of its own; prints the same
    holding.py URL calls KEY ...    claims calls of the only environment; prints its own name and the keys it got
    holding.py URL worker           is a worker; prints its own name
    holding.py URL drain            after a line of input, claims and finishes jobs until none waits; prints their ids
"""

import sys
import time

from autotuner.database import open_database, this_process


def main(url: str, what: str, *keys: str) -> None:
    name = this_process()
    with open_database(url) as database:
        queue = database.queue
        if what == "drain":
            print("ready", flush=True)
            sys.stdin.readline()
            while job := queue.claim(name, "cpu", "Xeon"):
                print(job.id, flush=True)
                queue.finish(job.id, name, "finished")
            return
        if what == "job":
            job = queue.claim(name, "cpu", "Xeon")
            print(name, job.id if job else None, flush=True)
        elif what == "attended":
            begun = queue.begin(model="m:p", request={}, device_type="cpu", device_name="Xeon", worker=name)
            print(name, begun.id, flush=True)
        elif what == "calls":
            (environment,) = database.environments()
            print(name, *sorted(database.claim_calls(environment.key, name, keys)), flush=True)
        else:
            queue.greet(name, "cpu", "Xeon")
            print(name, flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
