"""Heads of models: a linear layer whose logits only cross entropy reads is one operator with it, no other is."""

import copy
import json
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import autotuner
from autotuner.api.caches import without_cache
from autotuner.api.training import called, trace_past_notes
from autotuner.runtime import linear_cross_entropy as operator
from autotuner.runtime.capture import heads
from tests.runtime.capture.known import Compilation, Known, assert_equal, gradients

WORDS, HIDDEN, ROWS, LENGTH = 60, 32, 2, 12
SAID = f"the loss of {ROWS * LENGTH} rows of {WORDS} logits is computed with its head, 12 rows at a time"
SMALL = {
    "vocab_size": WORDS, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
SHARED = {"num_key_value_heads": 1, "head_dim": 16}
OF_T5 = {"d_model": HIDDEN, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0,
         "decoder_start_token_id": 0}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("BertConfig", "BertForMaskedLM", {}),
    "LLaMA": ("LlamaConfig", "LlamaForCausalLM", SHARED),
    "Gemma 2": ("Gemma2Config", "Gemma2ForCausalLM", SHARED),
    "Granite": ("GraniteConfig", "GraniteForCausalLM", {"num_key_value_heads": 1, "logits_scaling": 3.0}),
    "GPT-NeoX": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}),
    "T5": ("T5Config", "T5ForConditionalGeneration", OF_T5),
}


@pytest.fixture(autouse=True)
def small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "LOGITS_MIN", 1)
    monkeypatch.setattr(heads, "GRADIENTS", 0)
    monkeypatch.setattr(operator, "rows_of_chunk", lambda rows, _: -(-rows // 2))
    monkeypatch.setattr(heads, "rows_of_chunk", lambda rows, _: -(-rows // 2))


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(3, WORDS, (2, ROWS, LENGTH), generator=generator)
    labels[:, ::4] = -100
    return {"input_ids": ids, "labels": labels}


def of_hugging_face(name: str) -> Any:
    config, model, own = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**SMALL | own)).double()


def said(compilation: Compilation) -> list[str]:
    return [sentence for graph in compilation.compiled for sentence in graph.heads]


class Head(nn.Module):
    """A head behind something to train, with a loss by a function of logits and labels."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Any], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(HIDDEN, HIDDEN, dtype=dtype)
        self.head = nn.Linear(HIDDEN, WORDS, dtype=dtype)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.loss(self.head(torch.tanh(self.body(x))), labels)


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, LENGTH, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    return x, batch()["labels"]


def flat(logits: Tensor, labels: Tensor, **given: Any) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), **given)


JOINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as it is": flat,
    "sum": lambda logits, labels: flat(logits, labels, reduction="sum") / 7,
    "smoothed, another label ignored": lambda logits, labels: flat(
        logits, labels.clamp_min(5), ignore_index=5, label_smoothing=0.1
    ),
    "shifted": lambda logits, labels: flat(logits[:, :-1].contiguous(), labels[:, 1:]),
    "shifted from the end": lambda logits, labels: flat(logits[..., :-1, :], labels[..., 1:]),
    "words second": lambda logits, labels: functional.cross_entropy(logits.transpose(1, 2), labels),
    "words second by permute": lambda logits, labels: functional.cross_entropy(logits.permute(0, 2, 1), labels),
    "of one position": lambda logits, labels: functional.cross_entropy(logits[:, 3], labels[:, 3]),
    "capped": lambda logits, labels: flat(4.0 * torch.tanh(logits / 4.0), labels),
    "scaled": lambda logits, labels: flat((logits * 0.5).view(-1, WORDS).float().double(), labels),
    "as a module": lambda logits, labels: nn.CrossEntropyLoss()(logits.view(-1, WORDS), labels.view(-1)),
}


@pytest.mark.parametrize("case", JOINED)
def test_the_head_of_own_code_is_joined_with_its_loss(case: str) -> None:
    model, given = Head(JOINED[case]), operands()
    compilation = Compilation(model)
    found = gradients(model, lambda each: each(*given), compilation.model)
    assert len(said(compilation)) == 1
    tolerance = 1e-7 if case == "scaled" else 1e-12  # whose logits the framework rounds to float32 on the way
    assert_equal(found, gradients(model, lambda each: each(*given)), tolerance)


def changed_on_the_way(logits: Tensor, labels: Tensor) -> Tensor:
    logits.mul_(2.0)
    return flat(logits, labels)


APART: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "its logits are returned": lambda logits, labels: (flat(logits, labels), logits),
    "its logits are read": lambda logits, labels: flat(logits, labels) + logits.square().mean(),
    "its logits are changed": changed_on_the_way,
    "each word has a weight": lambda logits, labels: flat(logits, labels, weight=torch.ones(WORDS).double()),
    "a loss for each row": lambda logits, labels: flat(logits, labels, reduction="none").sum(),
    "probabilities are wanted": lambda logits, _: functional.cross_entropy(
        logits.flatten(0, 1), torch.full((ROWS * LENGTH, WORDS), 1 / WORDS).double()
    ),
    "divided by": lambda logits, labels: flat(2.0 / logits, labels),
    "divided and rounded": lambda logits, labels: flat(torch.div(logits, 2.0, rounding_mode="floor"), labels),
    "words are added up": lambda logits, labels: flat(logits.cumsum(-1), labels),
    "words are left out": lambda logits, labels: flat(logits[..., :50], labels % 50),
    "words are taken in steps": lambda logits, labels: flat(logits[..., ::2], labels % 30),
    "words are turned": lambda logits, labels: flat(logits.flip(-1), labels),
    "words are not last": lambda logits, labels: functional.cross_entropy(
        logits.view(ROWS, WORDS, LENGTH), labels
    ),
    "by a tensor": lambda logits, labels: flat(logits * torch.full((), 0.5).double(), labels),
    "its bias is broadcast": lambda logits, labels: flat(
        functional.linear(logits, torch.eye(WORDS).double(), torch.ones(1, WORDS).double()), labels
    ),
    "its cap is 0": lambda logits, labels: flat(torch.tanh(logits) / float("inf"), labels),
    "capped twice": lambda logits, labels: flat(torch.tanh(torch.tanh(logits)), labels),
}  # fmt: skip


@pytest.mark.parametrize("case", APART)
def test_a_head_is_left_alone_where(case: str) -> None:
    assert_left_alone(Head(APART[case]))


def assert_left_alone(model: Head) -> None:
    """Check that a model is compiled without a joined head, with the losses and gradients of eager mode."""
    given, compilation = operands(), Compilation(model)

    def loss(each: Any) -> Tensor:
        made = each(*given)
        return made if isinstance(made, Tensor) else made[0] + made[1].mean()

    found = gradients(model, loss, compilation.model)
    assert compilation.compiled
    assert not said(compilation)
    assert_equal(found, gradients(model, loss), 1e-12)


def test_a_bias_that_is_added_without_gradients_gets_none() -> None:
    class Biased(Head):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            logits = torch.tanh(self.body(x)) @ self.head.weight.t()
            with torch.no_grad():
                logits += self.head.bias
            return flat(logits, labels)

    model = Biased(flat)
    assert_left_alone(model)
    assert model.head.bias.grad is None


def test_a_head_whose_operands_are_changed_before_its_loss_is_left_alone() -> None:
    class Changed(Head):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            y = torch.sin(x)
            logits = self.head(y.detach())
            y.mul_(2.0)
            return flat(logits, labels) + y.mean()

    model, given = Changed(flat), operands()
    model.head.weight.requires_grad_(False)  # whose gradient would need what is changed
    compilation = Compilation(model)
    found = gradients(model, lambda each: each(*given), compilation.model)
    assert not said(compilation)
    assert_equal(found, gradients(model, lambda each: each(*given)), 1e-12)


def test_a_head_with_a_hook_that_reads_its_logits_is_left_alone() -> None:
    model, given = Head(flat), operands()
    seen: list[Tensor] = []
    model.head.register_forward_hook(lambda *call: seen.append(call[2].mean()))
    compilation = Compilation(model)
    found = gradients(model, lambda each: each(*given), compilation.model)
    assert not said(compilation)
    assert len(seen) == 1
    assert_equal(found, gradients(model, lambda each: each(*given)), 1e-12)


def test_a_head_is_left_alone_where_a_function_transforms_it() -> None:
    model, (x, labels) = Head(flat), operands()
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def slope(given: Tensor) -> Tensor:
        def loss(own: dict[str, Tensor]) -> Any:
            return torch.func.functional_call(model, own, (given, labels))

        found: Tensor = torch.func.grad(loss)(parameters)["head.bias"]
        return found

    compilation = Compilation(slope)  # type: ignore[arg-type]
    torch.testing.assert_close(compilation.model(x), slope(x))
    assert not said(compilation)


def test_what_ran_without_gradients_has_none_behind_it() -> None:
    class Without(Head):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            with torch.no_grad():
                logits = self.head(x)
            return flat(logits, labels)

    compilation = Compilation(Without(flat))
    assert not compilation.model(*operands()).requires_grad
    assert len(said(compilation)) == 1


def test_a_head_whose_gradients_are_larger_than_its_logits_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "GRADIENTS", 2)
    compilation = Compilation(Head(flat))
    compilation.model(*operands())
    assert not said(compilation)


def test_a_loss_that_is_wider_than_the_head_is_left_alone() -> None:
    compilation = Compilation(Head(lambda logits, labels: flat(logits.double(), labels), torch.float32))
    compilation.model(*operands(torch.float32))
    assert not said(compilation)


def test_float16_and_small_heads_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = operands(torch.float16)
    compilation = Compilation(Head(flat, torch.float16))
    compilation.model(x, labels)
    assert not said(compilation)
    monkeypatch.setattr(heads, "LOGITS_MIN", ROWS * LENGTH * WORDS + 1)
    compilation = Compilation(Head(flat))
    compilation.model(*operands())
    assert not said(compilation)


@pytest.mark.parametrize("frozen", ["body", "head.weight", "head"])
def test_parameters_that_are_frozen_get_no_gradient(frozen: str) -> None:
    model, given = Head(flat), operands()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    compilation = Compilation(model)
    found = gradients(model, lambda each: each(*given), compilation.model)
    assert said(compilation) == [SAID]
    assert not [name for name in found if name.startswith(frozen)]
    assert_equal(found, gradients(model, lambda each: each(*given)), 1e-12)


def test_without_gradients_the_loss_is_computed_alone() -> None:
    model, given = Head(flat), operands()
    compilation = Compilation(model)
    with torch.no_grad():
        found = compilation.model(*given)
    assert said(compilation) == [SAID]
    assert not found.requires_grad
    torch.testing.assert_close(found, model(*given).detach(), rtol=1e-13, atol=0)


def test_under_autocast_products_are_in_its_type_and_the_loss_in_float32() -> None:
    model, given = Head(flat, torch.float32), operands(torch.float32)

    def loss(each: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            made: Tensor = each(*given)
        assert made.dtype is torch.float32
        return made

    compilation = Compilation(model)
    found = gradients(model, loss, compilation.model)
    assert said(compilation) == [SAID]
    assert_equal(found, gradients(model, loss), 6e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_head_of_a_model_of_hugging_face_is_joined_with_its_loss(name: str) -> None:
    model = of_hugging_face(name)
    keywords = without_cache(model)

    def loss(each: Any) -> Tensor:
        return each(batch())  # type: ignore[no-any-return]

    trace_past_notes(model)

    def objective(given: dict[str, Tensor]) -> Tensor:
        return called(model, given, **keywords)

    compilation = Compilation(objective, Known(()), "aot_eager")  # type: ignore[arg-type]
    found = gradients(model, loss, compilation.model)
    assert set(said(compilation)) == {SAID}
    assert_equal(found, gradients(model, loss, objective), 1e-6)  # losses of the framework are in float32


@pytest.mark.slow
@pytest.mark.parametrize(("name", "path"), [("BERT", "cls.predictions.decoder"), ("GPT-2", "lm_head")])
def test_a_training_step_with_a_joined_head_trains_as_the_plain_one(name: str, path: str, tmp_path: Any) -> None:
    losses = {}
    for side in ("plain", "joined"):
        torch._dynamo.reset()
        model = of_hugging_face(name).float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if side == "plain":
            losses[side] = [_plain_step(model, optimizer) for _ in range(4)]
            continue
        step = autotuner.training_step(
            model, optimizer, database=tmp_path / "none.sqlite", compiler="aot_eager", watch=None
        )
        losses[side] = [step(batch()).item() for _ in range(4)]
        told = str(autotuner.summary(model))
        assert SAID in told
        assert f"{path}: one operator with the loss, some rows at a time" in told
        assert len(autotuner.summary(model).graphs) == 1
    assert losses["joined"] == pytest.approx(losses["plain"], rel=1e-4)
    assert losses["plain"][-1] < 0.9 * losses["plain"][0]


@pytest.mark.slow
def test_dynamo_can_write_down_settings_with_functions_whose_notes_are_traced_past() -> None:
    trace_past_notes(of_hugging_face("GPT-2"))
    once: Any = logging.getLogger("transformers").warning_once  # type: ignore[attr-defined]
    ignored = torch._dynamo.config.ignore_logger_methods
    assert once.__func__ in ignored
    assert json.loads(json.dumps(sorted(ignored))) == ["warning_once"]
    assert pickle.loads(pickle.dumps(ignored)) == {"warning_once"}
    assert once.__func__ in copy.deepcopy(ignored)


def _plain_step(model: Any, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(**batch()).loss
    loss.backward()
    optimizer.step()
    return float(loss.item())


@pytest.mark.slow
def test_inductor_compiles_what_is_around_a_head() -> None:
    model, given = Head(flat), operands()
    compilation = Compilation(model, compiler="inductor")
    found = gradients(model, lambda each: each(*given), compilation.model)
    assert said(compilation) == [SAID]
    assert_equal(found, gradients(model, lambda each: each(*given)), 1e-12)
