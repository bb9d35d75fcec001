"""What of the documents cannot run in a test, and what stands in for what a test's host has not.

A command that is not here runs as it is written.
"""

GPU = "needs an NVIDIA GPU"

NOT_RUN = {
    ("README.md", "scripts/test"): "runs all tests, this one among them",
    ("fleet.md", "autotuner tune bert-encoder:large --dtype bfloat16 --device cuda --gpus 8 --output large.json"): GPU,
    ("fleet.md", "autotuner worker --device cuda --gpus 8"): GPU,
    ("fleet.md", "autotuner node --head"): "becomes Ray's head; tests/fleet starts one",
    ("fleet.md", "autotuner worker --fleet --address 127.0.0.1:6379 --device cuda"): GPU,
    ("fleet.md", "autotuner node head.example:6379"): GPU,
    ("fleet.md", "sbatch --nodes 4 --gpus-per-node 8 deploy/slurm/fleet.sbatch"): "needs Slurm",
}  # fmt: skip
"""Commands by document, each with its reason."""

STAND_INS = {
    "tests/docs/recorded_times.py": "measuring takes minutes: recorded times of bert-encoder:tiny, and made-up ones",
    "tests/docs/stand_ins/docker": "Docker has no image here: the words behind the image's name run on this host",
    "tests/docs/stand_ins/curl/.curlrc": "an answer with an error ends curl with one",
    "tests/docs/clone.py": "`.venv` is made of what is installed here; `db` and other hosts are this one",
    "tests/postgresql.py": "the server at `db`, which a reader has already",
}
"""Files that stand in for something, each with what for."""
