"""Packed attention with a relative bias: against dense attention, and in models that have one."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import autotuner
from autotuner.errors import InputError
from autotuner.runtime.packing import relative_bias
from autotuner.runtime.packing.interface import attention_of
from tests.runtime.capture.known import Compilation, assert_equal, assert_is_slope, gradients
from tests.runtime.test_packing import padded

SIZES: dict[str, Any] = {
    "vocab_size": 120, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
}  # fmt: skip
LENGTHS = (40, 0, 1, 9, 0, 150)
"""Of sequences, the last one longer than what is computed at once."""


def t5(**options: Any) -> Any:
    torch.manual_seed(0)
    return transformers.T5ForTokenClassification(transformers.T5Config(**SIZES | options))


def bloom(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 120, "initializer_range": 0.3} | options
    return transformers.BloomForCausalLM(transformers.BloomConfig(**sizes))


def labelled(model: Any) -> dict[str, Tensor]:
    batch = padded()
    classes = model.config.num_labels if "TokenClassification" in type(model).__name__ else 120
    return batch | {"labels": torch.where(batch["labels"] < 0, batch["labels"], batch["labels"] % classes)}


def loss_of(tokens: dict[str, Tensor]) -> Callable[[Any], Tensor]:
    return lambda called: called(**tokens).loss


def dense(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, causal: bool) -> Tensor:
    """Return attention of each sequence alone, with a matrix of all its pairs."""
    groups, reach = query.shape[0] // key.shape[0], bias.shape[1] // 2
    found = []
    parts = (torch.split(each, list(LENGTHS), 1) for each in (query, key, value))
    for one, other, third in zip(*parts, strict=True):
        place = torch.arange(one.shape[1])
        distance = place[None] - place[:, None]
        scores = 0.3 * one @ other.repeat_interleave(groups, 0).transpose(1, 2)
        scores = scores + bias[:, distance.clamp(-reach, reach) + reach]
        if causal:
            scores = scores.masked_fill(distance > 0, float("-inf"))
        found.append(scores.softmax(-1) @ third.repeat_interleave(groups, 0))
    return torch.cat(found, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("shared", "reach"), [(4, 0), (4, 7), (2, 149), (1, 300)])
def test_values_and_all_gradients_are_those_of_dense_attention(
    dtype: torch.dtype, causal: bool, shared: int, reach: int
) -> None:
    torch.manual_seed(0)
    rows = sum(LENGTHS)
    shapes = [(4, rows, 8), (shared, rows, 8), (shared, rows, 8), (4, 2 * reach + 1)]
    given = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    bounds = autotuner.packed_bounds(torch.cat([torch.arange(length) for length in LENGTHS]), causal=causal)
    query, key, value, bias = given
    found = autotuner.packed_attention(query, key, value, bounds, 0.3, bias=bias)
    wide = [each.detach().double().requires_grad_() for each in given]
    wanted = dense(wide[0], wide[1], wide[2], wide[3], causal)
    weights = torch.randn(wanted.shape, dtype=torch.float64)
    mine = torch.autograd.grad((found * weights.to(dtype)).sum(), given)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for one, other in zip((found, *mine), (wanted, *torch.autograd.grad((wanted * weights).sum(), wide)), strict=True):
        assert one.dtype == dtype
        error = (one.detach().double() - other.detach()).abs().max()
        assert float(error) < tolerance * max(1.0, float(other.detach().abs().max()))


def test_weights_with_a_bias_are_dropped_without_a_bias_of_the_mean() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 12, 4, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(2, 9, dtype=torch.float64)
    bounds = autotuner.packed_bounds(torch.tensor([0, 1, 2, 3, 4, 5, 6, 0, 0, 1, 2, 3]))
    whole = autotuner.packed_attention(query, key, value, bounds, 0.5, bias=bias)
    drawn = torch.stack(
        [autotuner.packed_attention(query, key, value, bounds, 0.5, 0.3, bias=bias) for _ in range(900)]
    )
    error = drawn.std(0) / 900**0.5
    assert float(error.min()) > 0
    assert float(((drawn.mean(0) - whole) / error).abs().max()) < 4.5  # of 96 numbers


@pytest.mark.parametrize("shape", [(2, 4), (3, 5), (5,)])
def test_a_bias_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    same, bounds = torch.ones(2, 9, 4), autotuner.packed_bounds(torch.arange(9))
    with pytest.raises(
        InputError, match=r"a bias is \(2, distances\), of distances from -reach to reach, so an odd numb"
    ):
        autotuner.packed_attention(same, same, same, bounds, 1.0, bias=torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("make", [t5, bloom])
def test_tokens_losses_and_gradients_of_models_are_those_of_the_padded_batch(make: Any, dtype: torch.dtype) -> None:
    model = make().to(dtype).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    twin = copy.deepcopy(model)
    packing = autotuner.packed(model)
    assert packing.shifted is (make is bloom)
    batch = labelled(model)
    there = batch["attention_mask"].bool()
    wanted, found = twin(**batch), model(**packing(batch))
    is_exact = dtype == torch.float64 and make is t5  # BLOOM has its weights in float32
    tolerance = 1e-12 if is_exact else 2e-5
    of_tokens = packing.unpacked(found.logits, there)[there]
    torch.testing.assert_close(of_tokens, wanted.logits[there], rtol=tolerance, atol=10 * tolerance)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model(**batch).logits[there], wanted.logits[there], rtol=tolerance, atol=10 * tolerance)
    wanted.loss.backward()
    found.loss.backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-9 if is_exact else 1e-5)


def test_a_model_with_checkpoints_has_the_gradients_of_the_padded_batch() -> None:
    model = t5().train()
    twin, batch = copy.deepcopy(model), labelled(model)
    tokens = autotuner.packed(model)(batch)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**tokens).loss.backward()
    twin(**batch).loss.backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("config", [transformers.T5Config, transformers.MT5Config])
def test_encoders_alone_run_packed_and_their_bias_is_of_distances(config: Any) -> None:
    torch.manual_seed(0)
    model = getattr(transformers, config.__name__.replace("Config", "EncoderModel"))(config(**SIZES)).eval()
    packing = autotuner.packed(model)
    (maker,) = relative_bias.makers_of(model)
    assert relative_bias.of_distances(maker).shape == (1, 4, 1, 41)
    batch = padded()
    there = batch.pop("attention_mask").bool()
    asked: list[Any] = []
    maker.relative_attention_bias.register_forward_pre_hook(lambda _, given: asked.append(given[0].numel()))
    found = model(**packing({"input_ids": batch["input_ids"], "attention_mask": there})).last_hidden_state
    assert asked == [41]
    wanted = model(input_ids=batch["input_ids"], attention_mask=there.long()).last_hidden_state
    torch.testing.assert_close(packing.unpacked(found, there)[there], wanted[there], rtol=1e-4, atol=1e-5)


def test_a_bias_that_goes_on_behind_its_largest_distance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = t5()
    (maker,) = relative_bias.makers_of(model)
    monkeypatch.setattr(maker, "relative_attention_max_distance", 10)
    monkeypatch.setattr(
        maker, "_relative_position_bucket", lambda relative, **_: (relative.abs() > 15).long(), raising=False
    )
    with pytest.raises(InputError, match="T5Attention has a relative bias that changes behind a distance of 10"):
        autotuner.packed(model)
    assert attention_of(model) == {"": "sdpa"}
    assert not maker._forward_pre_hooks


def test_a_model_with_a_bias_in_each_layer_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="UMT5EncoderModel has attention to an encoder"):
        autotuner.packed(transformers.UMT5EncoderModel(transformers.UMT5Config(**SIZES)))


def test_a_bias_of_pairs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relative_bias, "bias_by_distances", lambda *_: None)
    with pytest.raises(InputError, match=r"T5Attention adds a bias of shape \[1, 4, 16, 16\] to its scores; packed at"):
        autotuner.packed(t5())


@pytest.mark.parametrize("make", [t5, bloom])
def test_a_packed_model_can_be_copied_and_be_as_before(make: Any) -> None:
    model = make().eval()
    before = attention_of(model)
    tokens = autotuner.packed(model)(labelled(model))
    wanted = model(**tokens).loss
    twins = [copy.deepcopy(model)]
    if make is bloom:  # transformers cannot pickle a T5 once its hidden states were asked for
        twins.append(pickle.loads(pickle.dumps(model)))
    for twin in twins:
        assert attention_of(twin) == {"": "autotuner_packed"}
        assert torch.equal(twin(**tokens).loss, wanted)
    autotuner.api.packing.unpacked_again(model, before)
    assert attention_of(model) == before
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any("Packed" in type(module).__name__ for module in model.modules())
    twin = make().eval()
    assert torch.equal(model(**labelled(model)).loss, twin(**labelled(model)).loss)


@pytest.mark.parametrize("make", [t5, bloom])
def test_tuned_layers_compute_the_same_and_alibi_takes_no_gradient(make: Any) -> None:
    options = {} if make is t5 else {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    model = make(**options).train()
    packing = autotuner.packed(model, tokens=256)
    twin = copy.deepcopy(model)
    compilation = Compilation(model)
    for seed in (1, 2):  # other sequences, by the same plan
        tokens = packing(labelled(model) | {"input_ids": padded(seed=seed)["input_ids"]})
        assert_equal(gradients(model, loss_of(tokens), compilation.model), gradients(twin, loss_of(tokens)), 1e-5)
    kinds = [operator.kind for region in compilation.regions for operator in region.plan.memory.graph.operators]
    assert kinds.count("packed_attention") == kinds.count("packed_attention_grad") == 2
    assert kinds.count("packed_attention_grad_bias") == (2 if make is t5 else 0)
    assert len(compilation.compiled) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [4, 12])
def test_a_model_that_rounds_its_scores_to_16_bits_is_packed(dtype: torch.dtype, heads: int) -> None:
    model = bloom(n_head=heads, hidden_size=8 * heads).to(dtype)
    assert autotuner.packed(model).shifted is True


@pytest.mark.parametrize("mode", ["autocast", "bfloat16"])
def test_tuned_layers_in_16_bits_have_the_bias_and_its_gradient_in_float32(mode: str) -> None:
    model = t5().train()
    model = model.bfloat16() if mode == "bfloat16" else model
    tokens = autotuner.packed(model, tokens=256)(labelled(model))

    def loss(called: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            found: Tensor = called(**tokens).loss
        return found

    compilation = Compilation(model)
    plain = gradients(copy.deepcopy(model), loss)
    assert_equal(gradients(model, loss, compilation.model), plain, 0.05)
    graphs = [region.plan.memory.graph for region in compilation.regions]
    made = [
        graph.tensors[operator.outputs[0]].dtype
        for graph in graphs
        for operator in graph.operators
        if operator.kind == "packed_attention_grad_bias"
    ]
    assert made == ["float32", "float32"]


def test_the_gradient_of_a_bias_is_a_slope_where_weights_are_dropped() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 12, 4, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    bounds = autotuner.packed_bounds(torch.tensor([0, 1, 2, 3, 4, 5, 6, 0, 0, 1, 2, 3]), causal=True)
    assert_is_slope(
        lambda: autotuner.packed_attention(query, key, value, bounds, 0.5, 0.3, bias=bias).square().sum(), bias
    )


def test_tuned_layers_with_a_bias_drop_weights_as_the_padded_model_does() -> None:
    model = t5(dropout_rate=0.3).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # of all but attention
    twin, batch = copy.deepcopy(model), labelled(model)
    tokens = autotuner.packed(model, tokens=256)(batch)
    compilation = Compilation(model)
    found = torch.tensor([float(compilation.model(**tokens).loss.detach()) for _ in range(60)])
    wanted = torch.tensor([float(twin(**batch).loss.detach()) for _ in range(60)])
    assert len(set(found.tolist())) > 50
    error = ((found.var() + wanted.var()) / 60).sqrt()
    assert float((found.mean() - wanted.mean()).abs() / error) < 4.5
    assert 0.5 < float(found.std() / wanted.std()) < 2
