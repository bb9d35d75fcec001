"""Run by tests as a process of its own: stores batches of calls, and prints the keys of each after its commit.

Usage: storing.py URL BATCHES CALLS_PER_BATCH [REVERSED]
"""

import sys

from autotuner.database import open_database
from autotuner.ir.records import Call, Candidate, Environment, Measurement, Node, Subgraph, TensorType

ENVIRONMENT = Environment("cpu", "Xeon", ())
SUBGRAPH = Subgraph((Node("gelu", "ab->ab", (0,), (1,)),), (TensorType((2, 3), "float32"),) * 2, (0,), (1,))


def main(url: str, batches: int, calls_per_batch: int, backwards: bool) -> None:
    with open_database(url) as database:
        database.remember(ENVIRONMENT)
        for batch in reversed(range(batches)) if backwards else range(batches):
            numbers = range(batch * calls_per_batch, (batch + 1) * calls_per_batch)
            calls = [Call(SUBGRAPH, Candidate("gelu", ("ab", "ab"), (("number", number),))) for number in numbers]
            written = database.store(ENVIRONMENT.key, [(call, Measurement("ok", 1.0)) for call in calls])
            print(written, *(call.key for call in calls), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] == ["REVERSED"])
