"""Packed batches with the libraries that people train with."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import autotuner

SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 120, "pad_token_id": 0,
}  # fmt: skip
LENGTHS = (5, 9, 3, 7, 20, 4, 6, 8)


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def examples() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 118, (length,), generator=generator).tolist() for length in LENGTHS]
    return [{"input_ids": row, "labels": list(row)} for row in rows]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def of(name: str, filler: int) -> torch.Tensor:
        return torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in rows])

    mask = [[1] * len(row["labels"]) + [0] * (longest - len(row["labels"])) for row in rows]
    return {"input_ids": of("input_ids", 0), "labels": of("labels", -100), "attention_mask": torch.tensor(mask)}


def losses(model: Any, collate: Any, folder: Path, **options: Any) -> list[float]:
    """Return the losses of a few steps of the Trainer."""
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True, seed=0,
        learning_rate=1e-2, save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=examples(), data_collator=collate)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}])
def test_a_trainer_has_the_losses_of_padded_batches(options: dict[str, Any], tmp_path: Path) -> None:
    model = llama()
    twin = copy.deepcopy(model)
    found = losses(model, autotuner.packed(model), tmp_path, **options)
    assert len(found) == 4
    assert found == pytest.approx(losses(twin, padded, tmp_path, **options), abs=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("is_packed_first", [True, False])
def test_adapters_get_the_gradients_of_the_padded_batch(is_packed_first: bool) -> None:
    plain, adapters = llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    twin = peft.get_peft_model(copy.deepcopy(plain), adapters)
    packer = autotuner.packed(plain) if is_packed_first else None
    torch.manual_seed(1)
    model = peft.get_peft_model(plain, adapters)
    packer = packer or autotuner.packed(model)
    batch = padded(examples())
    torch.autograd.backward(model(**packer(batch)).loss)
    torch.autograd.backward(twin(**batch).loss)
    trained = [each for each in zip(model.parameters(), twin.parameters(), strict=True) if each[0].requires_grad]
    assert len(trained) == 8
    for mine, other in trained:
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-7)
