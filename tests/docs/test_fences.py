"""Every fenced block says what it is, and a test runs or reads each that is more than plain text."""

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import yaml

from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import load_model
from autotuner.ir.program import parse_program
from autotuner.kernels.torch.programs import check_calls, differentiated
from autotuner.plan.configuration import json_schema
from autotuner.space import load_space
from tests.docs.blocks import CHECKED, DOCUMENTS, PLAIN, ROOT, RUN, Block, all_blocks, blocks, code_in

LANGUAGES = (*RUN, *CHECKED, PLAIN)
FENCE = re.compile(r"^ *(?:`{3,}|~{3,})", re.MULTILINE)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_has_a_language_that_a_test_knows(path: Any) -> None:
    found = blocks(path)
    assert len(FENCE.findall(path.read_text())) == 2 * len(found), "a fence is not closed, or stands in another"
    wrong = [f"{each.name}: {each.language!r}" for each in found if each.language not in LANGUAGES]
    assert wrong == [], f"write one of {', '.join(LANGUAGES)} behind the fence"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_no_code_hides_in_plain_text(path: Any) -> None:
    found = {each.name: code_in(each.text) for each in blocks(path) if each.language == PLAIN}
    assert {name: line for name, line in found.items() if line} == {}, "make them python, bash or console, which run"


@pytest.mark.parametrize(
    "text",
    [
        "autotuner.tune(model, example_inputs)   # minutes",
        "model = torch.compile(model)",
        "import autotuner",
        "from torch import nn",
        ">>> autotuner.summary()",
        "for batch in loader:\n    loss = step(batch)",
        "def _relu(o, grad):\n    (x,) = o.input_axes\n    return x",
        "$ autotuner tune bert-encoder:tiny --output tiny.json\nbert-encoder:tiny float32",
        "a picture\nscripts/quickstart    # set up",
        "  .venv/bin/autotuner submit bert-encoder:tiny --wait",
        "python -m pip wheel --no-deps --wheel-dir dist .",
        "pip install autotuner",
        "docker build --tag autotuner .",
        "curl http://127.0.0.1:8000/v1/jobs/1/events",
        "export AUTOTUNER_DATABASE=tunings.sqlite",
    ],
)
def test_code_in_plain_text_is_seen(text: str) -> None:
    assert code_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "torch_relu ('ab', 'ab') ok",
        "mlp.yaml: no preset 'smal'; known: small",
        'storage = "raw" | "byte" | "bit"',
        "client --HTTP--> service ---SQL--- runner: `autotuner worker --fleet`, one per cluster of Ray",
        "build(call, inputs, outputs) -> run",
        "no plan fits into 1,000 bytes",
    ],
)
def test_output_and_pictures_are_plain_text(text: str) -> None:
    assert code_in(text) is None


def part_of_a_configuration(name: str) -> Callable[[Block, Any], None]:
    """Check JSON as a part of a configuration."""

    def check(block: Block, _: Any) -> None:
        known = json_schema()["$defs"]
        jsonschema.validate(json.loads(block.text), known[name] | {"$defs": known})

    return check


def log_line(block: Block, _: Any) -> None:
    assert {"time", "level", "event", "request_id", "method", "path", "status", "caller"} <= json.loads(
        block.text
    ).keys()


def part_of_a_model(block: Block, _: Any) -> None:
    assert block.text in (ROOT / "search_spaces" / "models" / "bert_encoder.yaml").read_text()


def program(block: Block, _: Any) -> None:
    found = parse_program(block.text)
    check_calls(found, "pointwise")
    assert differentiated(found) == found


def whole_model(block: Block, folder: Any) -> None:
    """Check that a model file is complete, and what its document says of it."""
    (folder / "mlp.yaml").write_text(block.text)
    graph = load_model(str(folder / "mlp.yaml")).instantiate("small").graph()
    assert (len(graph.operators), len(training_graph(graph).operators)) == (5, 12)
    assert "graph of 5 forward operators; its training graph has 12" in block.path.read_text()


def search_space(block: Block, folder: Any) -> None:
    (folder / "space.yaml").write_text(block.text)
    assert load_space(folder / "space.yaml").max_operators == 8


def entry_of_a_search_space(block: Block, folder: Any) -> None:
    """Check an entry for a kernel that is only an example, by the name of one that exists."""
    entry = block.text.replace("triton_softmax", "torch_softmax")
    (folder / "space.yaml").write_text(f"version: 1\ndevice_type: cpu\nconversions: []\nkernels:\n{entry}")
    assert load_space(folder / "space.yaml").kernels["torch_softmax"].trials == 40


def scraping(block: Block, _: Any) -> None:
    (job,) = yaml.safe_load(block.text)["scrape_configs"]
    assert job.keys() == {"job_name", "authorization", "static_configs", "scheme"}


def proxy(block: Block, _: Any) -> None:
    """Check what a proxy's file must have for the service; nginx itself is not here."""
    lines = [line.strip() for line in block.text.splitlines() if line.strip()]
    assert all(line.endswith((";", "{", "}")) for line in lines)
    assert sum(line.count("{") - line.count("}") for line in lines) == 0
    passed = {line.split()[1] for line in lines if line.startswith("proxy_set_header")}
    assert passed == {"Connection", "Host", "X-Forwarded-For", "X-Forwarded-Proto", "X-Request-Id"}
    assert {"proxy_buffering off;", "client_max_body_size 1m;", "proxy_pass http://127.0.0.1:8000;"} <= set(lines)


CHECKS: dict[tuple[str, str], Callable[[Block, Any], None]] = {
    ("configuration.md", '{"branches": [[4, 7, 10, 12], [14, 18]], "gain_us": 41.3, "low_us": 37.3, "high_us": 45.8}'):
        part_of_a_configuration("Overlap"),
    ("configuration.md", ' "operators": ["key_projection", "value_projection", "key", "value"],'):
        part_of_a_configuration("Step"),
    ("configuration.md", ' "operators": ["grad_linear2_bias"],'): part_of_a_configuration("Alternative"),
    ("service.md", '{"time": "2026-11-23T05:25:55.309+00:00", "level": "info", "pid": 4711, "event": "request", '
                   '"request_id": "3fe258b36035fbe4", "method": "POST",'): log_line,
    ("service.md", "scrape_configs:"): scraping,
    ("service.md", "limit_conn_zone $binary_remote_addr zone=clients:1m;"): proxy,
    ("one-operator.md", "  - name: linear1"): part_of_a_model,
    ("models.md", "version: 1"): whole_model,
    ("models.md", '{"calls": [["div.Tensor", ["%0", 5.0], {}], ["tanh.default", ["%1"], {}], '
                  '["mul.Tensor", ["%2", 5.0], {}]],'): program,
    ("kernels.md", "version: 1"): search_space,
    ("kernels.md", "  triton_softmax:"): entry_of_a_search_space,
}  # fmt: skip
"""What reads each block of data, by its document and its first line (the second where the first is a bracket)."""


def place(block: Block) -> tuple[str, str]:
    lines = block.text.splitlines()
    return block.path.name, lines[1] if lines[0] == "{" else lines[0]


DATA = [each for each in all_blocks() if each.language in CHECKED]


@pytest.mark.parametrize("block", DATA, ids=lambda block: block.name)
def test_data_is_what_it_says(block: Block, tmp_path: Any) -> None:
    assert place(block) in CHECKS, "say in CHECKS what reads this block"
    CHECKS[place(block)](block, tmp_path)


def test_no_check_is_left_over() -> None:
    assert set(CHECKS) == {place(block) for block in DATA}
