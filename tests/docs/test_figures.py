"""Figures of README, and the picture beside them, are those of docs/results/bench_model_cuda.json."""

import json
from typing import Any

import pytest

from tests.docs.blocks import ROOT
from tests.docs.test_tables import rows
from tests.script import script

CASES = {each["case"]: each for each in json.loads((ROOT / "docs/results/bench_model_cuda.json").read_text())["cases"]}
NAMES = {
    "LLaMA 1B": "llama-1b", "Phi-1.5": "phi-1.5", "ViT-L (timm)": "timm vit-large", "GPT-2 medium": "gpt2-medium",
    "Qwen3 0.6B": "qwen3-0.6b", "ModernBERT-large": "modernbert-large", "T5-large": "t5-large",
    "Gemma 2 2B": "gemma-2-2b",
}  # fmt: skip
TUNED = "autotuner, captured"
ROWS = rows((ROOT / "README.md").read_text(), "model | eager, ms")


def figures(case: dict[str, Any]) -> list[str]:
    """Return a row as README has it, without its name."""
    ms, peer = case["ms"], case["best_peer"]
    # A side that ran in memory which earlier ones had reserved took more than was reserved for it.
    memory = [max(case["memory"][side].values()) / 2**30 for side in ("torch.compile cudnn", peer, TUNED)]
    tuning, steps = "-", "-"
    if "--prepared" not in case["run"]["command"]:
        seconds = case["seconds"]["tuning"]
        saved_ms = ms[peer] - ms[TUNED]
        tuning, steps = f"{seconds:.0f}", f"{round(1e3 * seconds / saved_ms, -3):,.0f}" if saved_ms > 0 else "never"
    compiled = f"{ms[peer]:.1f}" + ("" if "captured" in peer else " *")
    return [
        f"{ms['eager']:.1f}", compiled, f"{ms[TUNED]:.1f}", f"{case['ratio']:.2f}",
        *(f"{each:.1f}" for each in memory), tuning, steps,
    ]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_of_the_first_page_is_what_was_measured(row: list[str]) -> None:
    name, *told = [cell.strip(" |") for cell in row]
    assert told == figures(CASES[NAMES[name]])


def test_the_picture_is_what_its_script_draws() -> None:
    drawing = script("draw_models")
    assert drawing.PICTURE.read_text() == drawing.picture(CASES)
