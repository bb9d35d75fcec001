"""The framework's own layer for a configuration's model, and made-up calls of it: what is checked and timed against."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotuner.errors import ConfigurationError
from autotuner.ir.models import Model
from autotuner.ir.models.model import FRAMEWORK_LAYERS

_ACTIVATIONS = {"relu": functional.relu, "gelu_erf": functional.gelu, "gelu_tanh": nn.GELU(approximate="tanh")}


def encoder_layer(model: Model, seed: int = 0, device: str = "cpu") -> nn.TransformerEncoderLayer:
    """Return an nn.TransformerEncoderLayer in train mode, with random biases and scales, the same on any device.

    A gpt-block is one with norm_first=True, which `MadeUpCall` calls with a causal mask.

    Raises:
        ConfigurationError: the framework has no layer for this model.
    """
    extents, options = model.extents, model.options
    if not model.has_framework_layer:
        raise ConfigurationError(
            f"no framework layer for model {model.name!r} with extents {dict(extents)}: "
            f"nn.TransformerEncoderLayer is a {' or a '.join(FRAMEWORK_LAYERS)} whose h is n times p"
        )
    generator = torch.random.get_rng_state()
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(
        extents["h"],
        extents["n"],
        extents["f"],
        activation=_ACTIVATIONS[str(options["activation"])],  # type: ignore[arg-type]
        layer_norm_eps=float(options["epsilon"]),
        batch_first=True,
        norm_first=model.name == "gpt-block",
        dtype=getattr(torch, model.dtype),
    )
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.1)
    torch.random.set_rng_state(generator)
    layer.self_attn.dropout = float(options["attention_dropout"])
    layer.dropout1.p = float(options["output_dropout"])
    layer.dropout.p = float(options["activation_dropout"])
    layer.dropout2.p = float(options["feed_forward_dropout"])
    return layer.to(device)


@dataclass(frozen=True)
class MadeUpCall:
    """Arguments of one training step: input, gradient of the output, and masks.

    `padding` is true where a key does not count; `causal` is -inf where a key comes after the query.
    """

    x: Tensor
    grad_y: Tensor
    padding: Tensor | None = None
    causal: Tensor | None = None

    @property
    def masks(self) -> dict[str, Any]:
        """Keyword arguments of nn.TransformerEncoderLayer's forward."""
        found: dict[str, Any] = {} if self.padding is None else {"src_key_padding_mask": self.padding}
        return found if self.causal is None else found | {"src_mask": self.causal, "is_causal": True}

    @property
    def leaves(self) -> list[Tensor]:
        """Tensors beside parameters that get a gradient."""
        return [self.x]

    @property
    def device(self) -> torch.device:
        return self.x.device

    def forward(self, layer: nn.Module) -> Tensor:
        """Return a layer's output."""
        y: Tensor = layer(self.x, **self.masks)
        return y

    def step(self, layer: nn.Module) -> None:
        """Run a layer's forward, and backward with every gradient."""
        torch.autograd.backward(self.forward(layer), self.grad_y)

    @classmethod
    def of(cls, model: Model, seed: int = 0, device: str = "cpu") -> "MadeUpCall":
        """Return a call with random values, the same on any device."""
        extents = model.extents
        shape = (extents["b"], extents["l"], extents["h"])
        draw = torch.Generator().manual_seed(seed)
        x, grad_y = (torch.randn(shape, generator=draw).to(getattr(torch, model.dtype)) for _ in range(2))
        padding = None
        if model.options.get("attention_mask"):
            lengths = torch.randint(1, extents["l"] + 1, (extents["b"], 1), generator=draw)
            padding = torch.arange(extents["l"]) >= lengths
        x, grad_y = x.to(device), grad_y.to(device)
        causal = causal_mask(x) if model.name == "gpt-block" else None
        return cls(x.requires_grad_(), grad_y, None if padding is None else padding.to(device), causal)


def causal_mask(x: Tensor, batch_first: bool = True) -> Tensor:
    """Return the additive mask that an nn.TransformerEncoderLayer takes beside is_causal=True."""
    length = x.shape[1 if batch_first else 0]
    return nn.Transformer.generate_square_subsequent_mask(length, device=x.device, dtype=x.dtype)
