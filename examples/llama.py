#!/usr/bin/env python3
"""A LLaMA of transformers: whole training steps, on a GPU each as one CUDA graph.

python examples/llama.py           # LLaMA 1B with random weights: an NVIDIA GPU with 32 GiB
python examples/llama.py --small   # two narrow layers, on any machine
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import autotuner

SMALL = {
    "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
LLAMA_1B = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
}  # fmt: skip


def batches(steps: int, rows: int, length: int, vocabulary: int) -> Iterator[dict[str, Tensor]]:
    """Yield random tokens of one shape; a loader of your own data takes this place."""
    for _ in range(steps):
        ids = torch.randint(0, vocabulary, (rows, length))
        yield {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(**(SMALL if arguments.small else LLAMA_1B))
    rows, length = (2, 64) if arguments.small else (4, 1024)

    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)

    (example,) = batches(1, rows, length, config.vocab_size)
    step = autotuner.training_step(model, optimizer, example_inputs=example, max_norm=1.0)
    for number, batch in enumerate(batches(arguments.steps, rows, length, config.vocab_size)):
        loss = step({name: tensor.to(device) for name, tensor in batch.items()})
        scheduler.step()
        if number % 5 == 0:
            print(f"step {number}: loss {loss.item():.3f}")
    print(autotuner.summary(model))
    model.save_pretrained("llama")  # the parameters are the model's own


if __name__ == "__main__":
    main()
