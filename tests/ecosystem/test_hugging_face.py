"""Hugging Face's libraries with the backend: Trainer with resume, adapters of peft, save_pretrained."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.ecosystem.known import OPTIONS, Tuned, assert_same, remember, use

pytestmark = pytest.mark.slow

VOCABULARY, LENGTH, ROWS, LAYERS = 32, 8, 2, 2


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=2,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def tokens(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids[0], "labels": ids[1]}


class Samples(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8 * ROWS

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {name: value[0] for name, value in tokens(number).items()}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("known") / "known.sqlite"
    remember(found, bert(), [tokens(0)])
    return found


@pytest.fixture(autouse=True)
def known(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(path, monkeypatch)


def trained(folder: Path, compiled: bool, resume: bool = False) -> nn.Module:
    """Train for four steps, with a checkpoint after two; or only those after the checkpoint."""
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=4, save_steps=2, per_device_train_batch_size=ROWS, learning_rate=1e-2, report_to=[],
        max_grad_norm=0.5, use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    model = bert()
    if compiled:  # Trainer's own argument takes the backends only that accelerate lists
        model.compile(backend="autotuner", options=OPTIONS, dynamic=False)
    trainer = transformers.Trainer(model, arguments, train_dataset=Samples())
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    return model  # type: ignore[no-any-return]


def test_trainer_trains_saves_and_resumes(tmp_path: Path) -> None:
    tuned = Tuned()
    ours = trained(tmp_path / "ours", compiled=True)
    assert tuned.places == LAYERS * tuned.graphs > 0
    assert_same(ours, trained(tmp_path / "theirs", compiled=False), 1e-4)
    torch._dynamo.reset()
    assert_same(trained(tmp_path / "ours", compiled=True, resume=True), ours)
    assert tuned.places == LAYERS * tuned.graphs


def test_trainer_runs_what_was_tuned_with_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    remember(tmp_path / "llama.sqlite", model, [tokens(0)])
    use(tmp_path / "llama.sqlite", monkeypatch)
    tuned, theirs = Tuned(), copy.deepcopy(model)
    for each in (model, theirs):
        if each is model:
            each.compile(backend="autotuner", options=OPTIONS, dynamic=False)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=ROWS, learning_rate=1e-2, report_to=[],
            use_cpu=True, disable_tqdm=True, logging_strategy="no", save_strategy="no",
        )  # fmt: skip
        transformers.Trainer(each, arguments, train_dataset=Samples()).train()
    assert tuned.places == LAYERS * tuned.graphs > 0
    assert_same(model, theirs, 1e-4)


def losses(model: Any, called: Any, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    found = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = called(**tokens(number)).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_a_saved_model_is_loaded_and_computes_the_same(tmp_path: Path) -> None:
    model, tuned = bert(), Tuned()
    called: Any = torch.compile(model, backend="autotuner", options=OPTIONS)
    losses(model, called)
    called.save_pretrained(tmp_path)
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert_same(loaded, model)
    torch.testing.assert_close(loaded(**tokens(5)).loss, called(**tokens(5)).loss)
    assert tuned.places == LAYERS * tuned.graphs


def test_adapters_train_and_the_weights_below_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = peft.LoraConfig(r=4, target_modules=["query", "value"], lora_dropout=0.0)
    ours = peft.get_peft_model(bert(), config)
    theirs = copy.deepcopy(ours)
    remember(tmp_path / "lora.sqlite", lambda batch: ours(**batch), [(tokens(0),)])
    use(tmp_path / "lora.sqlite", monkeypatch)
    tuned = Tuned()
    before = {name: p.clone() for name, p in ours.named_parameters() if not p.requires_grad}
    found = losses(ours, torch.compile(ours, backend="autotuner", options=OPTIONS, dynamic=False))
    assert found == pytest.approx(losses(theirs, theirs))
    assert_same(ours, theirs)
    assert all(torch.equal(ours.get_parameter(name), value) for name, value in before.items())
    assert tuned.places == LAYERS
