#!/usr/bin/env python3
"""A vision transformer in plain torch: a model of one's own, with checkpointed blocks and configurations as files.

python examples/vision.py           # the sizes of ViT-L: an NVIDIA GPU with 32 GiB
python examples/vision.py --small   # two narrow blocks, on any machine
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autotuner


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.taken, self.given = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.taken(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        context = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.given(context.transpose(1, 2).reshape(batch, length, width))
        grown: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + grown


class VisionTransformer(nn.Module):
    def __init__(self, image: int, patch: int, width: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((image // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # less memory, one more forward
        classes: Tensor = self.head(self.norm(x).mean(1))
        return classes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows, image, classes = (2, 32, 10) if arguments.small else (64, 224, 1000)

    torch.manual_seed(0)
    model = VisionTransformer(image, 8, 64, 2, 2, classes) if arguments.small else None
    model = model or VisionTransformer(image, 14, 1024, 24, 16, classes)
    model = model.to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def batch() -> tuple[Tensor, Tensor]:
        """Return random images and classes; a loader takes this place."""
        images = torch.randn(rows, 3, image, image, device=device, dtype=dtype)
        return images, torch.randint(0, classes, (rows,), device=device)

    def loss_of(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = given
        return functional.cross_entropy(model(images), labels)

    found = autotuner.tune(model, batch()[:1])
    for number, configuration in enumerate(found):  # for hosts that have no database: files, given by name
        autotuner.save_configuration(configuration, f"vision-{number}.json")
    files = [f"vision-{number}.json" for number in range(len(found))]

    step = autotuner.training_step(model, optimizer, loss_of, configurations=files)
    for number in range(arguments.steps):
        loss = step(batch())
        if number % 5 == 0:
            print(f"step {number}: loss {loss.item():.3f}")
    print(autotuner.summary(model))


if __name__ == "__main__":
    main()
