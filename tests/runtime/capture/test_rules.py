"""Rules of ATen calls: what is not for them is unknown, and an error of theirs is told."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotuner.runtime.capture import fragment_rules
from autotuner.runtime.capture.axes import fresh
from autotuner.runtime.capture.constants import Constants
from autotuner.runtime.capture.known_masks import KnownMasks
from autotuner.runtime.capture.program import Expression, TensorValue, View
from autotuner.runtime.capture.reader import RULES, Reader, fits
from tests.runtime.capture.known import Compilation
from tests.runtime.capture.test_backend import blocks

aten: Any = torch.ops.aten


def failing(reader: Reader, x: View) -> View:  # noqa: ARG001
    return x.no_such_attribute  # type: ignore[attr-defined, no-any-return]


def test_an_error_of_a_rule_is_logged_and_the_call_stays_torchs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(RULES, aten.tanh.default, failing)
    monkeypatch.setattr(fragment_rules, "FAULTS_RAISE", False)
    model = nn.Sequential(blocks(2), nn.Tanh())
    compilation, x = Compilation(model), torch.randn(2, 3, 16)
    with caplog.at_level(logging.ERROR, "autotuner.capture"):
        torch.testing.assert_close(compilation.model(x), model(x))
    assert len(compilation.regions) == 2
    (record,) = caplog.records
    assert record.getMessage() == "the rule of aten.tanh.default failed: please report this"
    assert record.exc_info is not None
    (graph,) = compilation.compiled
    assert any("the rule of aten.tanh.default failed: AttributeError" in reason for reason in graph.reasons)


def test_an_error_of_a_rule_is_an_error_in_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, aten.tanh.default, failing)
    with pytest.raises(Exception, match="no_such_attribute"):
        Compilation(nn.Sequential(blocks(2), nn.Tanh())).model(torch.randn(2, 3, 16))


def view(*shape: int) -> View:
    dims = fresh(shape)
    return View(TensorValue(dims, "float32"), dims)


def test_a_call_fits_a_rule_by_the_types_that_the_rule_writes() -> None:
    reader, x = Reader(KnownMasks(Constants({}, lambda _: False))), view(2, 3)
    norm = RULES[aten.layer_norm.default]
    assert fits(norm, (reader, x, [3], None, x, 1e-5), {})
    assert fits(norm, (reader, x, [3]), {"eps": 1})
    assert not fits(norm, (reader, Expression("slice"), [3]), {})
    assert not fits(norm, (reader, x, [3], 2.0), {})
    assert not fits(norm, (reader, x, 3), {})
    assert not fits(norm, (reader, x, [x]), {})
    assert not fits(norm, (reader, x, [3]), {"of another": 1})
    assert fits(RULES[aten.clone.default], (reader, x), {"memory_format": torch.contiguous_format})


def test_what_no_rule_is_for_stays_torchs() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.transpose(0, 1).chunk(1, 0)[0] / float("inf")
            return y.mean().unsqueeze(0) @ x.flatten()[:1] + x.pow(2.0).sum() + (x @ x[0, 0]).relu().sum()

    model = nn.Sequential(blocks(2), Odd())
    compilation, x = Compilation(model), torch.randn(2, 3, 16)
    torch.testing.assert_close(compilation.model(x), model(x))
    assert len(compilation.regions) == 2
