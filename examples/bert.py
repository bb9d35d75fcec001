#!/usr/bin/env python3
"""A BERT of transformers with padded batches under autocast, in a loop of its own, with an evaluation.

python examples/bert.py           # BERT-large with random weights, in two lengths: an NVIDIA GPU with 24 GiB
python examples/bert.py --small   # two narrow layers, in one length, on any machine
"""

import argparse

import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

import autotuner

SMALL = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
BERT_LARGE = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
}  # fmt: skip


def padded(rows: int, length: int, vocabulary: int, device: str) -> dict[str, Tensor]:
    """Return random tokens, of which the last ones of each row are padding; a collator takes this place."""
    ids = torch.randint(1, vocabulary, (rows, length))
    lengths = torch.randint(length // 2, length + 1, (rows, 1))
    mask = (torch.arange(length) < lengths).long()
    labels = ids.masked_fill(mask == 0, -100)  # no loss where nothing is
    batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = BertConfig(**(SMALL if arguments.small else BERT_LARGE))
    rows, lengths = (2, (32,)) if arguments.small else (8, (256, 512))

    torch.manual_seed(0)
    model = BertForMaskedLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    autocast = torch.autocast(device, torch.bfloat16)

    with autocast:  # a model is tuned as it runs: inside of autocast, with masks, in each length and mode
        autotuner.tune(model, batches=[padded(rows, length, config.vocab_size, device) for length in lengths])
        model.eval()
        autotuner.tune(model, padded(rows, lengths[-1], config.vocab_size, device))
        model.train()

    model.compile(backend="autotuner", dynamic=False)
    for number in range(arguments.steps):
        batch = padded(rows, lengths[number % len(lengths)], config.vocab_size, device)
        with autocast:
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % 5 == 0:
            print(f"step {number}: loss {loss.item():.3f}")

    model.eval()
    with torch.no_grad(), autocast:
        held_out = model(**padded(rows, lengths[-1], config.vocab_size, device)).loss
    print(f"held out: loss {held_out.item():.3f}")
    print(autotuner.summary(model))


if __name__ == "__main__":
    main()
