"""What the benchmark on a GPU makes of timings and plans; timing itself needs the device."""

import dataclasses
from typing import Any

import pytest

from autotuner.errors import ConfigurationError
from autotuner.ir.models import Model, load_model
from autotuner.runtime import TunedWarning, describe
from autotuner.runtime.check import compare
from autotuner.runtime.framework import encoder_layer
from scripts.bench import errors, floors, layer_cuda
from scripts.bench.all_peers import SideTiming, fast_kernels, too_slow
from scripts.bench.cases import BERT_LAYER, CASES, ENCODER, bert_layer
from scripts.bench.errors import EAGER, LITTLE, TUNED, WITH_DROPOUT, measured_errors, with_little_dropout
from scripts.pages import Stages
from tests.runtime.layers import assert_equal, batch, gradients
from tests.runtime.plans import SITES, TINY, configuration, model
from tests.test_floors import CEILINGS


def like_bert(p: float = 0.0, dtype: str = "float64") -> Model:
    return model(dtype=dtype, p=p, activation_dropout=0.0)


def test_cases_fit_the_layers_that_they_are_measured_against() -> None:
    assert {case.layer for case in CASES.values()} == {ENCODER, BERT_LAYER}
    for case in CASES.values():
        tiny = dataclasses.replace(case.model, extents=TINY)
        found = describe(case.make(tiny))
        assert (found.model, found.dtype) == (case.model.name, case.model.dtype)
        assert found.options == {name: value for name, value in tiny.options.items() if name != "attention_mask"}


def test_a_bert_layer_has_the_values_of_the_encoder_layer() -> None:
    pytest.importorskip("transformers")
    found, wanted = (gradients(make(like_bert()), batch()) for make in (bert_layer, encoder_layer))
    assert_equal({name: found[name] for name in ("y", "x")}, {name: wanted[name] for name in ("y", "x")}, 1e-10)
    with pytest.raises(ValueError, match="no dropout behind its activation"):
        bert_layer(model(p=0.1))


def test_attention_kernels_are_compiled_that_come_near_the_fastest() -> None:
    times_us = {"sdpa flash": 9, "sdpa cudnn": 90, "sdpa cudnn, captured": 8, "sdpa efficient": 9.3, "eager": 1}
    assert fast_kernels(times_us, "sdpa ") == ["cudnn", "flash"]
    assert fast_kernels({}, "sdpa ") == []


def test_slow_peers_are_left_out_but_neither_the_plan_nor_eager() -> None:
    times_us = {
        "plan": 90,
        "plan, captured": 5,
        "eager": 80,
        "torch.compile, captured": 10,
        "sdpa flash": 11,
        "jax": 12,
    }
    assert too_slow(times_us) == {"jax": 12}
    assert too_slow({"plan": 1}) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-encoder", "gpt-block"])
def test_errors_are_those_of_rounding_for_the_plan_and_the_framework(name: str) -> None:
    options = dict.fromkeys(SITES, 0.3)
    found = configuration(load_model(name).instantiate(extents=TINY, dtype="float32", options=options), 1)
    table = measured_errors(encoder_layer, found, compare(found), None)
    assert [*table] == [TUNED, EAGER, WITH_DROPOUT]
    assert all(len(side) == 14 and all(1e-9 < error < 1e-5 for error in side.values()) for side in table.values())
    said = errors.lines(table)
    assert f"p = {LITTLE:.1g}" in said[0]
    assert said[-1].startswith("Tuned over eager: ")


@pytest.mark.slow
def test_a_side_that_fails_is_missing_in_the_table_of_errors() -> None:
    found = configuration(like_bert(0.3, "float32"), 1)
    with pytest.warns(TunedWarning, match=r"torch.compile sdpa efficient is not among the sides"):
        table = measured_errors(bert_layer, found, compare(found), "efficient")
    assert [*table] == [TUNED, EAGER, WITH_DROPOUT]


@pytest.mark.slow
def test_a_plan_keeps_its_kernels_with_little_dropout() -> None:
    found = configuration(like_bert(0.3), 1)
    little = with_little_dropout(found)
    assert little.steps == found.steps
    assert {little.model.options[site] for site in SITES} == {0.0, LITTLE}
    step = next(step for step in found.steps if step.outputs[0][0] == "output_dropout_mask")
    wrong = dataclasses.replace(step, kernel="torch_relu")
    with pytest.raises(ConfigurationError, match="torch_relu does not run with p"):
        with_little_dropout(dataclasses.replace(found, steps=(wrong, *found.steps[1:])))


@pytest.mark.slow
def test_a_page_has_all_parts_of_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    found, stages = configuration(like_bert(0.3), 1), Stages()
    with stages("tuning"):
        pass
    assert "tuning: 0.0 s" in capsys.readouterr().out
    timing = dataclasses.asdict(SideTiming(10.0, 9.0, 1 << 20, sm_clock_mhz=1980))
    of_sides = {TUNED: {"y": 2e-3, "grad x": 4e-3}, EAGER: {"y": 1e-3, "grad x": 8e-3}}
    row: dict[str, Any] = {
        "case": "bert-layer", "layer": BERT_LAYER, "model": "bert-encoder", "dtype": "float64",
        "options": dict(found.model.options), "extents": dict(found.model.extents),
        "timings": {"plan, captured": timing, "eager, captured": timing}, "left_out_us": {"jax": 2000.0},
        "tuned_us": 10.0, "best_peer": "eager, captured", "ratio_to_best_peer": 1.0, "predicted_over_measured": 0.0,
        "contraction_flop": 1, "bytes_moved": {"chosen": 1, "unfused": 2}, "bytes_reduction_percent": 50.0,
        "steps": layer_cuda.step_rows(found), "errors": of_sides, "dram": None, "seconds": stages.seconds,
        "run": {"date": "2026-11-22", "commit": "abc", "command": "scripts/bench_layer_cuda"},
    }  # fmt: skip
    sides = {name: {"read_bytes": mib << 20, "written_bytes": 0} for name, mib in (("tuned", 1), ("eager", 2))}
    row = layer_cuda.with_dram(row, {"sides": sides, "steps": {0: 3 << 20}, "reason": "eager: out of memory"})
    assert row["steps"][0]["dram_bytes"] == 3 << 20
    about = {
        "device_name": "H200", "multiprocessors": 132, "driver": "580", "cuda": "13.0", "cudnn": 9, "torch": "2.11",
        "triton": "3.6", "ceilings": CEILINGS.to_facts(), "ceilings_run": row["run"],
    }  # fmt: skip
    text = layer_cuda.page(about, floors.with_floors([row], CEILINGS))
    for part in (
        "| bert-layer | 0.010 | 0.010 | eager, captured | **1.00** |",
        "| -50.0% | -50.0% | 2.00 |",
        "BertLayer as bert-encoder in float64: activation gelu_erf",
        "jax 2.000.",
        "| y | 2.00e-03 | 1.00e-03 |",
        "Tuned over eager: 2.00 at most (y).",
        "eager: out of memory",
        "Seconds of this case: tuning 0.0.",
    ):
        assert part in text


def test_steps_that_run_beside_others_are_told_as_the_table_counts_them() -> None:
    assert layer_cuda.overlap({"branches": [[0, 3], [2]], "gain_us": 15.76, "low_us": 15.1, "high_us": 17.0}) == (
        "Overlap, steps of the table below by stream beside the others: 1, 4; 3. On the whole plan that saves 15.8 us "
        "(15.1 to 17.0)."
    )
