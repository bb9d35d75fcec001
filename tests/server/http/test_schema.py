"""Schemathesis: whatever the OpenAPI document allows is answered as it says, and whatever it forbids is refused.

By hand, with more examples, against a service that runs:
`schemathesis run http://127.0.0.1:8000/openapi.json --checks all --max-examples 500 --request-timeout 5`.
With a token, add `--header "Authorization: Bearer $AUTOTUNER_TOKEN"`.
The timeout is for events of jobs that no worker takes, which do not end.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from autotuner.database import Database
from tests.server.http.filled import ending_jobs
from tests.server.http.listening import listening

pytestmark = pytest.mark.slow

EXAMPLES = {"without a token": 12, "with a token": 5}
LIMIT_S = 250


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("how", EXAMPLES)
def test_what_the_document_says_is_true(filled: Database, tmp_path: Path, how: str) -> None:
    """All checks, of all operations, in all phases; jobs that are submitted end, so that their events do."""
    token = how == "with a token"
    header = ["--header", f"Authorization: Bearer {filled.tokens.create('', 'admin')[1]}"] if token else []
    filled.queue.finish(4, 1, "failed", message="made up")
    with listening(filled, local=not token) as server, ending_jobs(filled):
        command = [
            str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json", "--checks", "all",
            "--max-examples", str(EXAMPLES[how]), *header, "--generation-deterministic", "--request-timeout", "60",
            "--suppress-health-check", "all", "--continue-on-failure",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout
    assert "26 selected / 26 total" in done.stdout
    assert "No issues found" in done.stdout
