"""Calls of a training step with changing shapes: padded where that changes nothing, and why not elsewhere."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import autotuner
from autotuner.api.backend import COMPILED
from autotuner.errors import InputError
from autotuner.runtime.padding.batches import NotPaddedError, read
from autotuner.runtime.padding.calls import STRUCTURES, PaddedCalls
from autotuner.runtime.padding.choice import PaddingChoice
from autotuner.runtime.updates_in_backward import UpdatesInBackward
from autotuner.runtime.whole_step import WholeStep
from tests.runtime.whole_steps import Recorder

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 120,
    "max_position_embeddings": 64,
}  # fmt: skip
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SHAPES = [(4, 40), (4, 23), (4, 31), (4, 9), (4, 40), (4, 17), (2, 26)]
"""As of an epoch, the longest batch first: each is padded to its longest sequence, and the last one is smaller."""

Batch = dict[str, Tensor]


def bert(**options: Any) -> Any:
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL | WITHOUT_DROPOUT | options)).train()


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | options)).train()


def batch(rows: int, length: int, seed: int = 0, left: bool = False) -> Batch:
    """Return sequences of several lengths, padded to the longest one."""
    generator = torch.Generator().manual_seed(1000 * seed + 100 * rows + length)
    ids = torch.randint(3, 118, (rows, length), generator=generator)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    lengths[0] = length
    mask = torch.arange(length) < lengths[:, None]
    mask = mask.flip(1) if left else mask
    return {
        "input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)
    }  # fmt: skip


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def stepping(model: nn.Module, tmp_path: Path, **options: Any) -> WholeStep:
    torch._dynamo.reset()
    return autotuner.training_step(
        model, options.pop("optimizer", None) or sgd(model), compiler="eager", database=tmp_path / "none.sqlite",
        watch=None, **options,
    )  # fmt: skip


def padded_calls(model: Any) -> PaddedCalls:
    return PaddedCalls(model, lambda data: model(**data).loss, torch.device("cpu"), ignores=True)


@pytest.fixture(autouse=True)
def compiling_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have padding pay, however busy the machine is."""
    monkeypatch.setattr(PaddingChoice, "_compile_us", lambda _: float("inf"))


def uncompiled(
    model: nn.Module,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    recorder: Recorder | None = None,
) -> WholeStep:
    def objective(data: Any) -> Any:
        return model(**data).loss if loss is None else loss(model, data)

    calls_of_step = PaddedCalls(model, objective, torch.device("cpu"), ignores=True)
    return WholeStep(model, optimizer or sgd(model), objective, padded_calls=calls_of_step, recorder=recorder)


class Twin:
    """A copy of a model that a plain loop of torch trains."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor] | None = None) -> None:
        self.model = copy.deepcopy(model)
        self._optimizer = sgd(self.model)
        self._loss = loss or (lambda model, data: model(**data).loss)

    def train(self, data: Batch) -> Tensor:
        self._optimizer.zero_grad()
        loss = self._loss(self.model, data)
        torch.autograd.backward(loss)
        self._optimizer.step()
        return loss.detach()

    def assert_same(self, model: nn.Module) -> None:
        for (name, own), (_, other) in zip(model.named_parameters(), self.model.named_parameters(), strict=True):
            torch.testing.assert_close(own, other, rtol=2e-5, atol=2e-6, msg=name)


def check_same(model: nn.Module, step: WholeStep, batches: list[Batch], **options: Any) -> None:
    twin = Twin(model, **options)
    for data in batches:
        torch.testing.assert_close(step(data), twin.train(data), rtol=2e-6, atol=2e-6)
    twin.assert_same(model)


def test_a_process_that_trains_alone_among_others_pads_and_updates_in_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where `process_group` is this process alone, others that torch knows of do not count."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2 if group is None else 1)
    model = bert()
    alone: dict[str, Any] = {"group": "this process"}
    together: dict[str, Any] = {}
    for options, padded in ((alone, 1), (together, 0)):
        calls = PaddedCalls(model, lambda given: model(**given).loss, torch.device("cpu"), ignores=True, **options)
        for length in (20, 12):
            calls.fitted((batch(4, length),), ())
        assert calls.report.padded == padded, str(calls.report)
    with UpdatesInBackward(sgd(model), **alone).within():
        pass
    with pytest.raises(InputError, match="several processes"), UpdatesInBackward(sgd(model)).within():
        pass


def test_ids_that_are_labels_as_well_compile_nothing_anew(tmp_path: Path) -> None:
    model = llama()
    step = stepping(model, tmp_path)
    graphs = []
    for shape in ((4, 20), (4, 12), (4, 20)):
        data = batch(*shape)
        step({"input_ids": data["input_ids"], "labels": data["input_ids"]})
        graphs.append(len(autotuner.summary(model).graphs))
    assert step.padding.padded == 1
    assert graphs == [1, 1, 1]


@pytest.mark.parametrize("make", [bert, llama])
@pytest.mark.parametrize("has_mask", [True, False], ids=["mask", "no mask"])
def test_a_loop_with_changing_lengths_compiles_once_and_trains_as_torch_does(
    make: Callable[..., Any], has_mask: bool, tmp_path: Path
) -> None:
    model = make()
    step = stepping(model, tmp_path)
    batches = [batch(*shape, seed) for seed, shape in enumerate(SHAPES)]
    if not has_mask:
        batches = [{name: each for name, each in data.items() if name != "attention_mask"} for data in batches]
    if make is bert and not has_mask:  # to more rows alone
        batches = [batches[0], *({name: each[:rows] for name, each in batches[4].items()} for rows in (3, 2))]
    before = len(COMPILED)
    check_same(model, step, batches)
    assert len(COMPILED) == before + 1
    padded = len({tuple(data["input_ids"].shape) for data in batches} - {SHAPES[0]})
    assert (step.padding.calls, step.padding.padded, step.padding.shapes) == (len(batches), padded, 1)
    assert not step.padding.reasons
    assert f"{padded} of {len(batches)} calls were padded, by " in str(step)
    assert " of their tokens on average, and 1 shape ran" in str(step)
    assert f"of a training step, {step.padding}" in str(autotuner.summary(model))


def test_bert_without_a_mask_is_not_padded_to_more_columns(tmp_path: Path) -> None:
    model = bert()
    step = stepping(model, tmp_path)
    batches = [{name: each for name, each in batch(4, n).items() if name != "attention_mask"} for n in (20, 12)]
    check_same(model, step, [*batches, {name: each[:3] for name, each in batches[1].items()}])
    (reason,) = step.padding.reasons
    assert reason.startswith("with more columns, its loss of a few tokens is")
    assert step.padding.padded == 1  # the last one, by a row
    assert f"1 of 3 calls were not padded: {reason}" in str(step)


def test_a_larger_batch_is_compiled_and_then_the_nearest_one_is_padded_to(tmp_path: Path) -> None:
    model = llama()
    step = stepping(model, tmp_path)
    before = len(COMPILED)
    check_same(model, step, [batch(4, length, length) for length in (12, 30, 11, 13)])
    assert len(COMPILED) == before + 2
    report = step.padding
    assert (report.padded, report.shapes) == (2, 2)
    assert report.tokens == 4 * 24
    assert report.places in (4 * (12 + 30), 4 * (30 + 30))  # 11 goes where a step is measured to be faster


def test_pad_batches_turns_it_off(tmp_path: Path) -> None:
    step = stepping(llama(), tmp_path, pad_batches=False)
    before = len(COMPILED)
    for length in (12, 11):
        step(batch(2, length))
    assert len(COMPILED) == before + 2
    assert not str(step.padding)
    assert "padded" not in str(step)


def test_micro_batches_are_padded_each() -> None:
    model = bert()
    step, twin = uncompiled(model), Twin(model, lambda model, pair: sum(model(**b).loss for b in pair) / 2)
    for pair in [(batch(3, 20), batch(3, 30)), (batch(3, 18, 1), batch(2, 30, 1))]:
        torch.testing.assert_close(step(*pair), twin.train(pair), rtol=2e-6, atol=2e-6)  # type: ignore[arg-type]
    twin.assert_same(model)
    assert (step.padding.padded, step.padding.tokens, step.padding.places) == (1, 54 + 60, 60 + 90)


def test_encoder_and_decoder_have_lengths_of_their_own() -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 120}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config).train()
    step = uncompiled(model)
    check_same(model, step, [batch(3, n) | {"labels": batch(3, m)["labels"]} for n, m in ((30, 20), (24, 11), (30, 9))])
    assert (step.padding.padded, step.padding.shapes) == (2, 1)


def test_sequences_are_classified_as_without_padding() -> None:
    """Where the last token is the one that counts, the token for padding says which."""
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**SMALL, num_labels=3, pad_token_id=0)
    ).train()
    step = uncompiled(model)
    check_same(model, step, [batch(*shape) | {"labels": torch.arange(shape[0]) % 3} for shape in ((4, 20), (3, 12))])
    assert step.padding.padded == 1


class Masked(nn.Module):
    """A model that reads a few tokens; subclasses do so in ways that padding changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.inner, self.head = nn.Embedding(120, 8), nn.Linear(8, 8), nn.Linear(8, 120)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        x = self.inner(self.embedding(input_ids)) * attention_mask[..., None]
        x = self.mixed(x, attention_mask)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def mixed(self, x: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG002
        return x


class OfBatches(Masked):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def mixed(self, x: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG002
        found: Tensor = self.norm(x.flatten(0, 1))
        return found.reshape(x.shape)


class OfBatchesInTraining(Masked):
    def mixed(self, x: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG002
        return x - x.mean((0, 1)) if self.training else x


class NoisyInTraining(OfBatchesInTraining):
    def mixed(self, x: Tensor, mask: Tensor) -> Tensor:
        noisy: Tensor = x + torch.randn_like(x) / 10
        return super().mixed(noisy, mask) if self.training else x


class NoisyByLength(Masked):
    """Noise is the smaller the longer rows are, as that of NEFTune."""

    def mixed(self, x: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG002
        noise = torch.zeros_like(x).uniform_(-1, 1)
        return x + noise / float(x.shape[1] ** 0.5)


class Choosing(Masked):
    def mixed(self, x: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG002
        return x * (1 + torch.randint(2, x.shape))


class KeepsAMean(Masked):
    """Subtracts what it has seen in earlier steps."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def mixed(self, x: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG002
        before, self.seen = self.seen, 0.9 * self.seen + 0.1 * x.detach().mean((0, 1))
        return x - before


class KeepsAMeanAside(KeepsAMean):
    """The same in an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers.clear()
        self.seen = torch.zeros(8)


class Counting(Masked):
    """Changes with each call, by a number and a list that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[int] = []

    def mixed(self, x: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG002
        self.calls += 1
        self.seen.append(self.calls)
        return x * (1 + 0.1 * (self.calls + len(self.seen)))


class WithNoise(Masked):
    def mixed(self, x: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG002
        noisy: Tensor = x + torch.randn_like(x) / 10
        return functional.dropout(noisy, 0.2, self.training)


class FromTheRight(Masked):
    """Counts positions from the end of a row."""

    def mixed(self, x: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG002
        return x + torch.arange(x.shape[1], device=x.device).flip(0)[:, None] / 10


class Squares(Masked):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = self.embedding(input_ids).square().mean()
        return super().forward(input_ids, attention_mask, labels) + 1e-4 * found


class Picky(Masked):
    def mixed(self, x: Tensor, mask: Tensor) -> Tensor:
        if int(mask[-1, 0]) + x.shape[1] % 5 > 3:
            raise ValueError("no such length")
        return x


class WithARow(Masked):
    """Has a parameter that is read where anything is hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.zeros(8))

    def mixed(self, x: Tensor, mask: Tensor) -> Tensor:
        return x if bool(mask.all()) else x + self.row * (1 - mask)[..., None]


def with_embedding(**options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Masked()
        model.embedding = nn.Embedding(120, 8, **options)
        return model

    return make


def rotary() -> Any:
    return llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})


def regression() -> Any:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, num_labels=1)).eval()


def routed() -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **SMALL, num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.001
    )
    return transformers.MixtralForCausalLM(config)


REFUSED: dict[str, tuple[Callable[[], Any], tuple[int, int], str]] = {
    "batch norm": (OfBatches, (4, 12), "BatchNorm1d takes its mean over all rows and columns, padding included"),
    "a mean over the batch in training alone": (OfBatchesInTraining, (4, 12), "with more columns, its loss of a few"),
    "the same beside noise": (NoisyInTraining, (4, 12), "with more columns, its loss of a few"),
    "noise that follows from the length": (NoisyByLength, (4, 12), "with more columns, its loss of a few"),
    "random numbers without a range": (Choosing, (4, 12), "it draws random numbers by randint, which"),
    "a running mean": (KeepsAMean, (4, 12), "with more columns, seen, which later steps may read, is another one"),
    "a running mean that is no buffer": (KeepsAMeanAside, (4, 12), "with more columns, seen, which later steps may"),
    "positions that follow from the length": (FromTheRight, (4, 12), "with more columns, its loss of a few"),
    "a loss of all tokens": (Squares, (4, 12), "with more columns, the gradient of embedding.weight is another one"),
    "a mean over rows without labels": (regression, (3, 20), "with more rows, its loss of a few tokens is"),
    "routers": (routed, (3, 20), "(the auxiliary loss of its routers counts padding)"),
    "an embedding that is scaled": (with_embedding(max_norm=1.0), (4, 12), "max_norm scales the row of the padding"),
    "frequencies of tokens": (with_embedding(scale_grad_by_freq=True), (4, 12), "depend on which tokens a batch has"),
    "frequencies of positions": (rotary, (4, 12), "its rotary positions (dynamic) depend on the length of the batch"),
    "a parameter for what is hidden": (WithARow, (4, 12), "with more columns, row gets a gradient, or does without"),
    "a model that raises": (Picky, (4, 12), "on a few tokens, with more columns, it raised ValueError: no such length"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_padding_changes_is_refused(name: str) -> None:
    make, shape, sentence = REFUSED[name]
    model = make()
    calls = PaddedCalls(model, lambda data: getattr(found := model(**data), "loss", found), torch.device("cpu"))
    batches = [batch(4, 20), batch(*shape)]
    if name == "a mean over rows without labels":
        batches = [data | {"labels": torch.rand(len(data["labels"]))} for data in batches]
    states = {name: each.clone() for name, each in model.state_dict().items()}
    modes, drawn = [module.training for module in model.modules()], torch.get_rng_state()
    for data in batches:
        assert calls.fitted((data,), None).batches == (data,)
    (reason,) = calls.report.reasons
    assert sentence in reason
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(states[name], each) for name, each in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_of_the_users_that_reads_all_outputs_is_refused() -> None:
    def loss(model: Any, data: Any) -> Any:
        return model(**data).logits.square().mean()

    model = llama()
    step = uncompiled(model, loss)
    check_same(model, step, [batch(3, 20), batch(3, 12)], loss=loss)
    assert step.padding.padded == 0
    assert sum(step.padding.reasons.values()) == 1


def test_a_loss_may_take_labels_out_of_its_batch() -> None:
    def loss(model: Any, data: Any) -> Any:
        labels = data.pop("labels")
        return functional.cross_entropy(model(**data).logits.flatten(0, 1), labels.flatten())

    model = bert()
    step, twin = uncompiled(model, loss), Twin(model, loss)
    for length in (20, 12):
        data = batch(3, length)
        torch.testing.assert_close(step(data), twin.train(dict(data)), rtol=2e-6, atol=2e-6)
    assert step.padding.padded == 1


def test_dropout_is_off_while_padding_is_tried_and_on_again_afterwards() -> None:
    model = bert(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    step = uncompiled(model)
    for length in (20, 12):
        step(batch(3, length))
    assert step.padding.padded == 1
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.1}


def test_a_model_that_counts_its_calls_does_not_count_those_of_the_check() -> None:
    def loss(model: Any, data: Any) -> Any:
        return model(**data)

    model = Counting()
    step = uncompiled(model, loss)
    check_same(model, step, [batch(3, 20), batch(3, 12), batch(3, 20)], loss=loss)
    assert (model.calls, model.seen, step.padding.padded) == (3, [1, 2, 3], 1)


def test_noise_and_dropout_by_a_function_do_not_keep_batches_from_being_padded() -> None:
    model = WithNoise()
    step = uncompiled(model, lambda model, data: model(**data))
    for length in (20, 12):
        step(batch(3, length))
    assert step.padding.padded == 1, str(step.padding)
    assert all(module.training for module in model.modules())


def test_padding_at_the_left_is_told_apart_where_it_matters() -> None:
    """Eager attention has a token that sees nothing look at all places, and the first label may be its own."""
    model = llama(attn_implementation="eager")
    calls = padded_calls(model)
    for data in (batch(4, 30), batch(4, 20)):
        calls.fitted((data,), None)
    assert calls.report.padded == 1
    data = batch(4, 20, left=True)
    assert calls.fitted((data,), None).batches == (data,)
    (reason,) = calls.report.reasons
    assert reason.startswith("where rows have their own padding at the left, or within: with more columns, ")


def test_checkpoints_and_types_of_16_bits_are_tried_in_float64() -> None:
    for model in (llama().to(torch.bfloat16), llama()):
        if model.dtype == torch.float32:
            model.gradient_checkpointing_enable()
        calls = padded_calls(model)
        for shape in ((4, 20), (3, 12)):
            calls.fitted((batch(*shape),), None)
        assert calls.report.padded == 1, calls.report
        assert {parameter.dtype for parameter in model.parameters()} == {model.dtype}


def test_a_batch_without_labels_decides_nothing() -> None:
    model = bert()
    calls = padded_calls(model)
    calls.fitted((batch(4, 20),), None)
    empty = batch(4, 12) | {"labels": torch.full((4, 12), -100)}
    assert calls.fitted((empty,), None).batches == (empty,)
    assert list(calls.report.reasons) == ["a batch has no label to try padding with"]
    calls.fitted((batch(4, 11),), None)
    assert calls.report.padded == 1


def test_a_loss_that_may_not_know_ignored_labels_is_not_tried_with_them() -> None:
    model = Masked()
    calls = PaddedCalls(model, lambda data: model(**data), torch.device("cpu"))
    for length in (20, 12):
        data = batch(4, length)
        calls.fitted((data | {"labels": data["input_ids"]},), None)
    (reason,) = calls.report.reasons
    assert reason.startswith("no label of a batch is -100")
    calls.fitted((batch(4, 11),), None)
    assert calls.report.padded == 1


IDS = torch.ones(2, 6, dtype=torch.long)
UNREADABLE: dict[str, tuple[Any, str]] = {
    "no names": ([IDS], "only names of a mapping say what can be padded"),
    "no tokens": ({"pixels": torch.ones(2, 3)}, "a batch has no input_ids of (sequences, length)"),
    "another name": ({"input_ids": IDS, "bbox": IDS}, "a batch holds 'bbox', and it is not known how that is padded"),
    "a mask of pairs": ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 6, 6)}, "attention_mask has 4 axes"),
    "other rows": ({"input_ids": IDS, "labels": IDS[:1]}, "labels has 1 rows, and input_ids 2"),
    "flattened sequences": ({"input_ids": IDS, "position_ids": IDS}, "position_ids without an attention_mask may keep"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_batches_that_are_not_known_run_as_they_are(name: str) -> None:
    data, sentence = UNREADABLE[name]
    with pytest.raises(NotPaddedError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        read(data)


def test_a_number_that_changes_in_each_batch_leaves_nothing_behind() -> None:
    calls = padded_calls(bert())
    for step in range(3 * STRUCTURES):
        calls.fitted(({**batch(2, 9), "step": step},), None)
        calls.fitted((batch(2, 9),), None)
    assert len(calls._groups) == STRUCTURES
    assert calls.fitted((batch(2, 7),), None).batches[0]["input_ids"].shape == (2, 9)


def test_calls_of_one_shape_say_nothing_and_those_of_others_say_why() -> None:
    model = Masked()
    calls = PaddedCalls(model, model, torch.device("cpu"))
    for length in (6, 6, 5):
        calls.fitted(({"x": torch.ones(2, length)},), None)
        assert bool(str(calls.report)) == (length == 5)
    (count,) = calls.report.reasons.values()
    assert count == 1


def test_the_shape_of_example_inputs_is_padded_to_before_it_has_run(tmp_path: Path) -> None:
    model = llama()
    step = stepping(model, tmp_path)
    step.expect(batch(4, 30))
    before = len(COMPILED)
    check_same(model, step, [batch(4, 20), batch(3, 30), batch(4, 30)])
    assert (step.padding.padded, len(COMPILED) - before) == (2, 1)


def test_a_padded_call_is_a_replay_of_the_graph_that_is_there() -> None:
    model = llama()
    twin, optimizer = Twin(model), torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    recorder = Recorder(model, optimizer)
    step = uncompiled(model, lambda model, data: model(**data, use_cache=False).loss, optimizer, recorder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, shape in enumerate([(4, 20)] * 3 + [(4, 13), (2, 20), (3, 9)]):
            data = batch(*shape, number)
            torch.testing.assert_close(step(data), twin.train(data), rtol=2e-6, atol=2e-6)
    twin.assert_same(model)
    assert (recorder.captures, step.replays, step.plain) == (1, 4, 2)
    assert step.padding.padded == 3
