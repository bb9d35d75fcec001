"""The framework's own layer for a configuration's model, and made-up calls of it: what is checked and timed against."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotuner.errors import ConfigurationError
from autotuner.ir.models import Model

_ACTIVATIONS = {"relu": functional.relu, "gelu_erf": functional.gelu, "gelu_tanh": nn.GELU(approximate="tanh")}


def encoder_layer(model: Model, seed: int = 0, device: str = "cpu") -> nn.TransformerEncoderLayer:
    """Return an nn.TransformerEncoderLayer in train mode, with random biases and scales, the same on any device.

    Raises:
        ConfigurationError: the framework has no layer for this model.
    """
    extents, options = model.extents, model.options
    if model.name != "bert-encoder" or extents["h"] != extents["n"] * extents["p"]:
        raise ConfigurationError(
            f"no framework layer for model {model.name!r} with extents {dict(extents)}: "
            "nn.TransformerEncoderLayer is a bert-encoder whose h is n times p"
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
    """Arguments of one training step: input, gradient of the output, and padding, true where a key does not count."""

    x: Tensor
    grad_y: Tensor
    padding: Tensor | None

    @property
    def masks(self) -> dict[str, Tensor]:
        """Keyword arguments of nn.TransformerEncoderLayer's forward."""
        return {} if self.padding is None else {"src_key_padding_mask": self.padding}

    @classmethod
    def of(cls, model: Model, seed: int = 0, device: str = "cpu") -> "MadeUpCall":
        """Return a call with random values, the same on any device."""
        extents = model.extents
        shape = (extents["b"], extents["l"], extents["h"])
        draw = torch.Generator().manual_seed(seed)
        x, grad_y = (torch.randn(shape, generator=draw).to(getattr(torch, model.dtype)) for _ in range(2))
        padding = None
        if model.options["attention_mask"]:
            lengths = torch.randint(1, extents["l"] + 1, (extents["b"], 1), generator=draw)
            padding = torch.arange(extents["l"]) >= lengths
        x, grad_y = x.to(device), grad_y.to(device)
        return cls(x.requires_grad_(), grad_y, None if padding is None else padding.to(device))
