"""Checks, on a few tokens, that a packed model makes of each token what it makes of it in a padded batch."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autotuner.errors import InputError
from autotuner.runtime.packing.batches import IGNORED, Packer
from autotuner.runtime.packing.interface import NAME, recorded

LENGTHS = (4, 6, 1)
OUTPUTS = ("logits", "last_hidden_state")
"""Of a model, one of which has an entry for each token."""


def check(model: Any, before: str, packer: Packer) -> bool:
    """Check that outputs and loss of a packed batch are those of the padded one, and say whether labels are shifted.

    Args:
        model: whose attention is packed attention.
        before: the attention that it had.

    Raises:
        InputError: they are not.
    """
    try:
        return _checked(model, before, packer)
    except InputError:
        raise
    except Exception as error:  # whatever a model raises
        said = str(error).strip().partition("\n")[0]
        raise _refusal(model, f"on a few tokens, it raised {type(error).__name__}: {said}") from error


def _checked(model: Any, before: str, packer: Packer) -> bool:
    batch = _batch(model)
    mask = batch["attention_mask"].bool()
    tokens = packer(batch)
    with _quiet(model):
        with _attention(model, before):
            name, wanted, loss = _ran(model, batch)
        with recorded() as record:
            found = _output(model, tokens, name)
        others = tokens | {"input_ids": tokens["input_ids"].clone()}
        others["input_ids"][0, : LENGTHS[0]] = tokens["input_ids"][0, : LENGTHS[0]].flip(0) + 1
        apart = _output(model, others, name)
        _check_windows(model, record.windows)
        if not record.windows:
            raise _refusal(model, f"its attention does not go through transformers' interface as {NAME}")
        tolerance = _tolerance(found)
        own = slice(LENGTHS[0], sum(LENGTHS))
        if not torch.allclose(found[0, own], apart[0, own], rtol=0, atol=tolerance * float(found.abs().max())):
            raise _refusal(model, "tokens of one sequence change what it makes of another one")
        made = packer.unpacked(found, mask)
        wanted = wanted * mask.view(*mask.shape, *[1] * (wanted.dim() - 2))
        worst = float((made - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-30)
        if not worst <= 100 * tolerance:
            raise _refusal(model, f"what it makes of tokens differs by {worst:.2g} of the largest number")
        return False if loss is None else _are_shifted(model, batch, packer, loss, tolerance)


def _are_shifted(model: Any, batch: dict[str, Tensor], packer: Packer, loss: Tensor, tolerance: float) -> bool:
    """Say whether a model's loss is of the next token's label."""
    found = {}
    for shifted in (False, True):
        tokens = Packer(packer.multiple, packer.tokens, shifted, packer.first)(batch)
        found[shifted] = float(model(**tokens).loss)
        if abs(found[shifted] - float(loss)) <= 10 * tolerance * abs(float(loss)):
            return shifted
    raise _refusal(model, f"its loss is {found[False]:.6g}, or {found[True]:.6g}, and padded {float(loss):.6g}")


def _tolerance(found: Tensor) -> float:
    return 1e-5 if found.dtype.itemsize > 2 else 1e-3


def _batch(model: Any) -> dict[str, Tensor]:
    """Return a padded batch of a few tokens for a model, with labels where it takes them for each token."""
    words = int(model.get_input_embeddings().weight.shape[0])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, max(words - 1, 3), (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids[~mask] = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
    made = {"input_ids": ids, "attention_mask": mask.long()}
    if "labels" in inspect.signature(model.forward).parameters:
        made["labels"] = torch.where(mask, ids % 2, IGNORED)
    device = next(model.parameters()).device
    return {name: each.to(device) for name, each in made.items()}


def _ran(model: Any, batch: dict[str, Tensor]) -> tuple[str, Tensor, Tensor | None]:
    """Run a model on a padded batch; return the name and value of an output that has an entry for each token, and the
    loss."""
    try:
        made = model(**batch)
    except Exception:  # labels are of something else than tokens
        if batch.pop("labels", None) is None:
            raise
        made = model(**batch)
    shape = batch["input_ids"].shape
    name = next((name for name in OUTPUTS if isinstance(getattr(made, name, None), Tensor)), None)
    if name is None or getattr(made, name).shape[:2] != shape:
        told = (
            f"its {name} are {list(getattr(made, name).shape)}" if name else "it has neither logits nor hidden states"
        )
        raise _refusal(model, f"{told} for {list(shape)} tokens: packed, an output of a sequence has no place")
    return name, getattr(made, name), getattr(made, "loss", None)


def _output(model: Any, tokens: dict[str, Tensor], name: str) -> Tensor:
    found: Tensor = getattr(model(**{key: each for key, each in tokens.items() if key != "labels"}), name)
    return found


def _check_windows(model: Any, windows: list[int | None]) -> None:
    """Check that layers that have a window have said so: a few tokens do not show it."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        wanted = len(windows) if has_window else 0
    else:
        strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if strange:
            raise _refusal(model, f"it has layers of {', '.join(strange)}")
        wanted = list(kinds).count("sliding_attention")
    if sum(window is not None for window in windows) != wanted:
        raise _refusal(model, f"{wanted} of its layers have a window, and {len(windows)} calls do not tell of as many")


def _refusal(model: nn.Module, reason: str) -> InputError:
    return InputError(f"{type(model).__name__} cannot run packed: {reason}")


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode, without gradients, autocast or a change of torch's generators."""
    modes = {module: module.training for module in model.modules()}
    device = next(model.parameters()).device
    try:
        with (
            torch.no_grad(), torch.autocast(device.type, enabled=False),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
        ):  # fmt: skip
            model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    """Have a model use an implementation of attention for a while."""
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(NAME)
