"""A head and its cross entropy as one operator: values and gradients are the framework's, logits are never whole."""

import itertools
from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autotuner.kernels.torch.cross_entropy import CrossEntropy
from autotuner.measure.devices import device_of
from autotuner.runtime import linear_cross_entropy as head
from autotuner.runtime.devices import CudaRuntime
from tests.kernels.calls import interpreted

ROWS, FEATURES, WORDS = 37, 8, 50
MEAN, SUM = CrossEntropy(), CrossEntropy(mean=False)
CASES = {
    "mean": MEAN,
    "sum": SUM,
    "another label ignored": CrossEntropy(ignored=3),
    "smoothed": CrossEntropy(smoothing=0.1),
    "factor": CrossEntropy(factor=0.25, mean=False),
    "cap": CrossEntropy(factor=0.5, cap=3.0, smoothing=0.1),
}


@pytest.fixture(params=[5, 1024], ids=["chunks", "whole"])
def rows_min(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    found: int = request.param
    monkeypatch.setattr(head, "ROWS_MIN", found)
    return found


def operands(dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, weight, bias and labels, of which some are ignored."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for shape in ((ROWS, FEATURES), (WORDS, FEATURES), (WORDS,))
    )
    labels = torch.randint(0, WORDS, (ROWS,), generator=generator)
    labels[::5] = -100
    return x, weight, bias, labels.to(device)


def computed(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: CrossEntropy = MEAN, **given: Any
) -> Tensor:
    dtype = given.get("dtype", x.dtype)
    wanted = [each is not None and each.requires_grad for each in (x, weight, bias)]
    told = [float(each) for each in astuple(settings)]
    of_loss = given.get("of_loss", dtype)
    arguments = (x, weight, bias, labels, dtype, of_loss, wanted, told, given.get("squares"))
    loss: Tensor = torch.ops.autotuner.linear_cross_entropy(*arguments)[0]
    return loss


def by_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: CrossEntropy = MEAN,
    squares: Tensor | None = None,
) -> Tensor:  # fmt: skip
    scores = functional.linear(x, weight, bias) * settings.factor
    if settings.cap:
        scores = settings.cap * torch.tanh(scores)
    reduction = "mean" if settings.mean else "sum"
    loss = functional.cross_entropy(
        scores, labels, ignore_index=settings.ignored, reduction=reduction, label_smoothing=settings.smoothing
    )
    return loss if squares is None else loss + (squares * scores.logsumexp(1).square()).sum()


def gradients(loss: Tensor, leaves: list[Tensor], by: float = 1.0) -> list[Tensor]:
    return list(torch.autograd.grad(loss * by, leaves))


@pytest.mark.usefixtures("rows_min")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("biased", [True, False])
def test_loss_and_gradients_are_the_frameworks(case: str, biased: bool) -> None:
    x, weight, bias, labels = operands()
    labels = labels.where(labels >= 0, CASES[case].ignored)
    given = (x, weight, bias if biased else None, labels, CASES[case])
    loss, wanted = computed(*given), by_torch(*given)
    torch.testing.assert_close(loss, wanted, rtol=1e-13, atol=0)
    leaves = [x, weight, bias][: 2 + biased]
    for found, right in zip(gradients(loss, leaves, 3.0), gradients(wanted, leaves, 3.0), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("rows_min")
@pytest.mark.parametrize("case", CASES)
def test_a_z_loss_is_added_in_rows_that_are_ignored_too(case: str) -> None:
    x, weight, bias, labels = operands()
    labels = labels.where(labels >= 0, CASES[case].ignored)
    squares = torch.linspace(0, 0.1, 2 * ROWS, dtype=torch.float64)[::2]
    given = (x, weight, bias, labels, CASES[case])
    loss, wanted = computed(*given, squares=squares), by_torch(*given, squares)
    torch.testing.assert_close(loss, wanted, rtol=1e-13, atol=0)
    leaves = [x, weight, bias]
    for found, right in zip(gradients(loss, leaves, 3.0), gradients(wanted, leaves, 3.0), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)


def test_the_parts_of_a_loss_are_told_and_have_no_gradients() -> None:
    x, weight, _, labels = operands()
    squares = torch.full((ROWS,), 0.01)
    told = [float(each) for each in astuple(MEAN)]
    arguments = (x, weight, None, labels, x.dtype, x.dtype, [True, True, False], told)
    assert torch.ops.autotuner.linear_cross_entropy(*arguments)[4].shape == (0,)
    loss, *_, parts = torch.ops.autotuner.linear_cross_entropy(*arguments, squares)
    first = by_torch(x, weight, None, labels)
    torch.testing.assert_close(parts, torch.stack([first, loss - first]), rtol=1e-12, atol=0)
    with pytest.raises(RuntimeError, match="only their sum has gradients"):
        parts[0].backward()


@pytest.mark.usefixtures("rows_min")
@pytest.mark.parametrize("biased", [True, False])
def test_empty_words_that_fill_up_products_change_nothing(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias, labels = operands()
    given = (x, weight, bias if biased else None)
    read = [each for each in given if each is not None]
    expected = torch.autograd.grad(computed(*given, labels), read)
    assert head.empty_words(WORDS, torch.device("cpu")) == 0
    assert head.empty_words(WORDS, torch.device("cuda", 0)) == 14
    monkeypatch.setattr(head, "empty_words", lambda words, _: -words % CudaRuntime.columns_multiple)
    loss = computed(*given, labels)
    found = torch.autograd.grad(loss, read)
    torch.testing.assert_close(loss, by_torch(*given, labels), rtol=1e-13, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)


def test_rows_may_lie_anyhow_and_labels_too() -> None:
    x, weight, bias, labels = operands()
    turned = x.detach().t().contiguous().t().requires_grad_()
    spread = torch.stack([labels, labels], 1)[:, 0]
    loss, wanted = computed(turned, weight, bias, spread), by_torch(x, weight, bias, labels)
    torch.testing.assert_close(loss, wanted, rtol=1e-13, atol=0)
    torch.testing.assert_close(gradients(loss, [turned])[0], gradients(wanted, [x])[0], rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("rows_min")
@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3)))
def test_only_gradients_that_are_wanted_are_made(wanted: tuple[bool, bool, bool]) -> None:
    x, weight, bias, labels = operands()
    leaves = [each.requires_grad_(want) for each, want in zip((x, weight, bias), wanted, strict=True)]
    loss, right = computed(x, weight, bias, labels), by_torch(x, weight, bias, labels)
    torch.testing.assert_close(loss, right, rtol=1e-13, atol=0)
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    assert loss.requires_grad == bool(asked)
    if asked:
        for one, other in zip(gradients(loss, asked), gradients(right, asked), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("rows_min")
def test_bfloat16_is_as_near_to_float64_as_the_framework_is() -> None:
    exact = operands()
    leaves, right = list(exact[:3]), by_torch(*exact)
    near = operands(torch.bfloat16)
    errors: dict[str, list[float]] = {}
    for name, function in (("ours", computed), ("torch", by_torch)):
        loss = function(*near)
        found = [loss.detach(), *gradients(loss, list(near[:3]))]
        pairs = zip(found, [right.detach(), *gradients(right, leaves)], strict=True)
        errors[name] = [float((one - other).norm() / other.norm()) for one, other in pairs]
        right = by_torch(*exact)
    assert all(ours <= 1.2 * torchs + 2e-3 for ours, torchs in zip(errors["ours"], errors["torch"], strict=True))


@pytest.mark.usefixtures("rows_min")
def test_products_in_bfloat16_of_parameters_in_float32_are_those_of_autocast() -> None:
    x, weight, bias, labels = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = by_torch(x, weight, bias, labels)
        loss = computed(x, weight, bias, labels, dtype=torch.bfloat16, of_loss=torch.float32)
    torch.testing.assert_close(loss, wanted, rtol=1e-3, atol=0)
    leaves = [x, weight, bias]
    for found, right in zip(gradients(loss, leaves), gradients(wanted, leaves), strict=True):
        assert found.dtype is torch.float32
        assert float((found - right).norm() / right.norm()) < 6e-3


def test_where_every_label_is_ignored_the_mean_is_nan_and_the_sum_0_as_the_frameworks() -> None:
    x, weight, bias, labels = operands()
    labels = torch.full_like(labels, -100)
    assert computed(x, weight, bias, labels).isnan()
    assert by_torch(x, weight, bias, labels).isnan()
    assert all(not each.any() for each in gradients(computed(x, weight, bias, labels), [x, weight, bias]))
    loss = computed(x, weight, bias, labels, SUM)
    assert loss == 0
    assert all(not gradient.any() for gradient in gradients(loss, [x, weight, bias]))


@pytest.mark.parametrize("label", [WORDS, -1])
def test_a_label_that_is_no_word_is_an_error(label: int) -> None:
    x, weight, bias, labels = operands()
    labels[4] = label
    with pytest.raises(
        IndexError, match=f"target {label} is out of bounds: labels are 0 to {WORDS - 1}, or -100, which is ignored"
    ):
        computed(x, weight, bias, labels)


def test_gradients_are_not_differentiated_again() -> None:
    x, weight, bias, labels = operands()
    (of_x,) = torch.autograd.grad(computed(x, weight, bias, labels), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative through a head"):
        torch.autograd.grad(of_x.square().sum(), weight)


def test_the_gradient_of_the_loss_is_not_rounded_to_the_type_of_the_parameters() -> None:
    x, weight, bias, labels = operands(torch.bfloat16)
    whole, third = (
        gradients(computed(x, weight, bias, labels, of_loss=torch.float32), [weight], by)[0].double()
        for by in (1.0, 1 / 3)
    )
    assert float((third * whole).sum() / whole.square().sum()) == pytest.approx(1 / 3, rel=8e-4)  # bfloat16 has 0.334


def test_a_graph_that_is_kept_gives_the_same_gradients_twice() -> None:
    x, weight, bias, labels = operands()
    loss = computed(x, weight, bias, labels)
    first = torch.autograd.grad(loss, [x, weight, bias], retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, [x, weight, bias]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("biased", [True, False])
def test_what_the_compiler_is_told_is_what_runs(biased: bool) -> None:
    x, weight, bias, labels = operands()
    given = (x, weight, bias if biased else None, labels)
    dtypes, wanted = (torch.float64, torch.float64), [True, True, biased]
    arguments = (*given, *dtypes, wanted, [-100.0, 1.0, 0.1, 1.0, 0.0])
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")  # others differentiate the gradients
    for squares in (None, torch.full((ROWS,), 0.01)):
        torch.library.opcheck(torch.ops.autotuner.linear_cross_entropy, (*arguments, squares), test_utils=checks)


@pytest.mark.parametrize(
    ("rows", "features", "wanted"), [(0, 64, 1), (1, 64, 1), (1024, 64, 1024), (1025, 64, 513), (16384, 1024, 2048)]
)
def test_chunks_are_alike_and_as_large_as_the_weight_in_float32(rows: int, features: int, wanted: int) -> None:
    assert head.rows_of_chunk(rows, features) == wanted


def test_a_step_allocates_a_chunk_of_logits_in_place_of_three_times_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "ROWS_MIN", 256)
    rows, features, words = 2048, 64, 8000
    x = torch.randn(rows, features, requires_grad=True)
    weight = torch.randn(words, features, requires_grad=True)
    labels = torch.randint(0, words, (rows,))
    logits, of_leaves = 4 * rows * words, 4 * features * (rows + words)

    def peak(function: Any) -> int:
        return device_of("cpu", 0).allocated_bytes(lambda: gradients(function(x, weight, None, labels), [x, weight]))

    assert head.rows_of_chunk(rows, features) == rows // 8
    assert 3 * logits <= peak(by_torch) <= 3.1 * logits + 2 * of_leaves
    assert logits / 8 <= peak(computed) <= 1.02 * logits / 8 + 3 * of_leaves


@pytest.mark.slow
def test_tritons_program_computes_the_same() -> None:
    found = interpreted("tests.kernels.interpreted_cross_entropy")
    assert len(found) == 48
    bounds = {name: 1e-6 if "float32" in name or "loss" in name else 2**-7 for name in found}
    assert {name: error for name, error in found.items() if not error <= bounds[name]} == {}


@pytest.mark.gpu
@pytest.mark.usefixtures("rows_min")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_on_cuda_loss_and_gradients_are_the_frameworks(case: str, dtype: torch.dtype, z_loss: float) -> None:
    squares = torch.full((ROWS,), z_loss, device="cuda") if z_loss else None
    exact = operands(device="cuda")
    settings = CASES[case]
    labels = exact[3].where(exact[3] >= 0, settings.ignored)
    near = operands(dtype, "cuda")
    loss = computed(*near[:3], labels, settings, squares=squares)
    wanted = by_torch(*exact[:3], labels, settings, squares)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(loss.double(), wanted, rtol=tolerance, atol=0)
    pairs = zip(gradients(loss, list(near[:3])), gradients(wanted, list(exact[:3])), strict=True)
    assert all(float((one - other).norm() / other.norm()) < tolerance for one, other in pairs)
