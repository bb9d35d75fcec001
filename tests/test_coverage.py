"""scripts/coverage: what it counts of two small models, and what its page says of rows."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from autotuner.runtime.capture.calls import flop_counter
from scripts.bench.architectures import Architecture, Made, architectures, features
from scripts.bench.coverage_counts import Layers, checked, counted, row_of
from scripts.bench.coverage_page import page
from scripts.bench.transformers_classes import LAYERS, classes, shrunk
from tests.runtime.capture.test_backend import HIDDEN
from tests.runtime.capture.test_coverage import LENGTH, Layered

ROOT = Path(__file__).resolve().parent.parent
ABOUT: dict[str, Any] = {"versions": {"torch": "2"}, "date": "today", "commit": "0", "command": "it", "install": []}


class Stopped(nn.Module):
    """A layer that asks the host for a number: no graph goes on behind that."""

    def __init__(self, stops: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layered(unknown=False, layers=1).layers[0] for _ in range(2))
        self.stem, self.stops = nn.Linear(HIDDEN, HIDDEN), stops

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer["attention"](x)  # type: ignore[index]
            if self.stops and x.sum().item() > 1e9:
                break
            x = layer["mlp"](x)  # type: ignore[index]
        return x


def of(model: type[nn.Module], *given: Any) -> Architecture:
    def make() -> Made:
        return model(*given), (features(2, LENGTH, HIDDEN),)

    return Architecture("tiny", "own code", make)


def test_layers_are_modules_with_a_number_that_are_made_of_others() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
    model.head = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    layers = Layers.of(model)
    assert layers.paths == {"blocks.0", "blocks.1"}
    assert (layers.of_path("blocks.1.0"), layers.of_path("head.0")) == ("blocks.1", "")
    assert Layers.of(model, "head").paths == set()


def test_paths_of_a_graph_that_begins_inside_of_the_model_are_found_in_it() -> None:
    layers = Layers({"model.vision.layers.0", "model.text.layers.0"}, {
        "model.vision.stem", "model.vision.layers.0.mlp.up", "model.text.layers.0.mlp.up", "model.text.layers.0.norm",
    })  # fmt: skip
    assert layers.before({"model.vision.stem"}) == ""
    assert layers.before({"vision.stem", "vision.layers.0.mlp.up"}) == "model."
    assert layers.before({"mlp.up"}) == "model.text.layers.0."
    assert layers.before({"mlp.up", "norm"}) == "model.text.layers.0."
    assert layers.before({"mlp.up", "elsewhere"}) == layers.before(set()) == ""


@pytest.mark.slow
def test_layers_for_images_and_layers_for_texts_are_regions() -> None:
    """Graphs end where transformers compares numbers of image tokens; stems and projections are no layers."""
    row = row_of(architectures()["LLaVA"], check=True, tracing=False)
    assert (row["share"], row["layers"], row["places"]) == (1.0, 6, 6)
    assert row["graphs"] > 1
    assert row["share_of_all"] < 0.95
    assert row["error"] < 1e-12


@pytest.mark.slow
def test_whole_layers_are_counted_without_stem_and_head() -> None:
    row = counted(of(Stopped, False), tracing=False)
    assert (row["share"], row["layers"], row["graphs"]) == (1.0, 2, 1)
    assert row["layers_flop"] < row["flop"]
    assert row["share_of_all"] == pytest.approx(row["layers_flop"] / row["flop"])
    assert [region["runs"] for region in row["regions"]] == [2]
    assert row["tuned_share"] == pytest.approx(1.0)


@pytest.mark.slow
def test_a_graph_that_ends_inside_of_a_layer_loses_no_flop() -> None:
    whole, stopped = (counted(of(Stopped, stops), tracing=False) for stops in (False, True))
    assert stopped["graphs"] > 1
    assert (stopped["flop"], stopped["layers_flop"]) == (whole["flop"], whole["layers_flop"])
    assert 0 < stopped["share"] <= 1


@pytest.mark.slow
def test_regions_compute_what_eager_does() -> None:
    found = checked(of(Stopped, False))
    assert found["places"] == 2
    assert found["error"] < 1e-12


def test_what_is_not_installed_or_fails_is_a_row() -> None:
    lacking = Architecture("one", "no_such_library", lambda: (nn.Linear(1, 1), ()))
    assert row_of(lacking, check=False, tracing=False) == {"status": "not installed", "why": "no_such_library"}
    failing = Architecture("two", "own code", lambda: (nn.Linear(2, 3), (torch.zeros(1, 5),)))
    row = row_of(failing, check=False, tracing=False)
    assert row["status"] == "error"
    assert "mat1 and mat2 shapes cannot be multiplied" in row["why"]
    said = page(ABOUT, [{"name": "two", "family": "own code", **row}])
    assert "0 of 1 architectures" in said
    assert "| two | own code | **error**: RuntimeError" in said


def test_there_are_enough_architectures_of_each_library() -> None:
    families = {each.family for each in architectures().values()}
    assert families == {"transformers", "torch.nn", "timm", "x-transformers", "diffusers", "torchvision", "own code"}
    assert len(architectures()) >= 60


@pytest.mark.slow
def test_the_script_writes_a_page_and_keeps_the_rows_of_others(tmp_path: Path) -> None:
    lacking = {"name": "GPT-2", "family": "transformers", "status": "not installed", "why": "transformers"}
    (tmp_path / "coverage.json").write_text(json.dumps({"architectures": [lacking]}))
    command = [str(ROOT / "scripts" / "coverage"), "--only", "MLP-Mixer, own code", "--append", "--no-tracing"]
    command = [sys.executable, *command, "--output", str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    rows = json.loads((tmp_path / "coverage.json").read_text())["architectures"]
    assert [row["name"] for row in rows] == ["GPT-2", "MLP-Mixer, own code"]
    told = [(row["status"], row.get("why")) for row in rows]
    assert told == [("not installed", "transformers"), ("ok", None)], done.stderr
    assert "| MLP-Mixer, own code | own code |" in (tmp_path / "coverage.md").read_text()


def test_products_of_experts_are_counted() -> None:
    rows, weight = torch.zeros(16, 16), torch.zeros(2, 16, 8)
    with flop_counter() as counter:
        torch._grouped_mm(rows.bfloat16(), weight.bfloat16(), offs=torch.tensor([8, 16], dtype=torch.int32))
    assert counter.get_total_flops() == 2 * 16 * 16 * 8


def test_classes_of_transformers_are_small_by_rule() -> None:
    known = classes()
    assert len(known) > 250
    assert known["LlamaForCausalLM"].family == "llama"
    made = shrunk(transformers.GraniteMoeHybridConfig)
    assert made["layer_types"] == ["full_attention", "linear_attention"] * 2
    assert made["num_hidden_layers"] == LAYERS
    for name in ("LlamaForCausalLM", "T5ForConditionalGeneration", "ViTForImageClassification"):
        model, batch = known[name].make()
        assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
        assert set(batch) >= {"labels"}


def test_an_error_in_float32_says_so() -> None:
    row = {"name": "tiny", "family": "own code", "status": "ok", "share": 1.0, "share_of_all": 1.0, "layers": 1,
           "regions": [], "tuned_share": 1.0, "read_s": 0.0, "dynamo_s": 0.0, "reasons": [], "why_not": ""}  # fmt: skip
    assert "| 3e-07 (float32) |" in page(ABOUT, [row | {"error": 3e-7, "checked_in": "float32"}])
    assert "| **3e-07** |" in page(ABOUT, [row | {"error": 3e-7}])
    assert "| **3e-03** (float32) |" in page(ABOUT, [row | {"error": 3e-3, "checked_in": "float32"}])
