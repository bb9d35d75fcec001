#!/usr/bin/env python3
"""A LLaMA that is larger than the GPU: its layers, their gradients and the optimizer's state stay on the host.

python examples/layer_to_layer.py           # LLaMA 7B, random weights: a GPU with 16 GiB, a host with 110 GiB
python examples/layer_to_layer.py --small   # two narrow layers, on any machine
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autotuner

SMALL = {
    "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(**(SMALL if arguments.small else {}))  # those of transformers are a LLaMA 7B's
    rows, part, length = (4, 2, 64) if arguments.small else (16, 4, 1024)

    torch.manual_seed(0)
    model = LlamaForCausalLM(config)  # in float32, on the host
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)

    ids = torch.randint(0, config.vocab_size, (arguments.steps, rows, length))
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        step = autotuner.layer_to_layer(
            model, optimizer, example_inputs={"input_ids": ids[0], "labels": ids[0]}, micro_batch_size=part,
            device=device, optimizer_in_backward=True, stash="host",
            link_dtype=torch.bfloat16 if device == "cuda" else None,
        )  # fmt: skip
        for number in range(arguments.steps):
            loss = step({"input_ids": ids[number], "labels": ids[number]})  # some rows at a time, one update
            scheduler.step()
            if number % 5 == 0:
                print(f"step {number}: loss {loss.item():.3f}")
    print(step)  # what a step took, and what bounds it
    print(autotuner.summary(model))
    model.save_pretrained("llama")  # the parameters are the model's own


if __name__ == "__main__":
    main()
