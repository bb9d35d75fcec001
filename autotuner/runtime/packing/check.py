"""Checks, on a few tokens, that a packed model makes of each token what it makes of it in a padded batch."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from autotuner.errors import InputError
from autotuner.runtime.batches import IGNORED
from autotuner.runtime.devices import device_runtime
from autotuner.runtime.packing.batches import Packer
from autotuner.runtime.packing.interface import NAME, recorded, set_attention
from autotuner.runtime.padding.rules import padding_token

LENGTHS = (4, 11, 1)
OUTPUTS = ("logits", "last_hidden_state")
"""Of a model, one of which has an entry for each token."""
_CHECKING = Lock()


def check(model: Any, before: dict[str, str], first: int) -> bool | None:
    """Check that outputs and loss of a packed batch are those of the padded one, and say whether labels are shifted.

    Args:
        model: whose attention is packed attention.
        before: the attention that it had, and its parts.
        first: the position of a sequence's first token.

    Returns:
        Whether the loss of a token is that of the next one's label; None where the model has no loss by labels.

    Raises:
        InputError: they are not.
    """
    plain = getattr(model, "_orig_mod", model)  # which is not compiled for shapes that never come again
    try:
        with _CHECKING, _quiet(plain):
            return _checked(plain, before, first)
    except InputError:
        raise
    except Exception as error:  # whatever a model raises
        raise _refusal(model, _told(error)) from error


def _told(error: Exception) -> str:
    said = str(error).strip().partition("\n")[0]
    return f"on a few tokens, it raised {type(error).__name__}: {said}"


def _checked(model: Any, before: dict[str, str], first: int) -> bool | None:
    if any(getattr(each, "attn_temperature_tuning", 0) and not each.use_rope for each in model.modules()):
        raise _refusal(model, "it scales queries by their place in a batch (attn_temperature_tuning)")
    packer = Packer(1, None, False, first)
    batch = _batch(model)
    mask = batch["attention_mask"].bool()
    tokens = packer(batch)
    with _attention(model, before):
        padded = _outputs(model, batch)
        shifted, loss = _loss_by_labels(model, batch)
    for each in padded:
        if each.shape[:2] != mask.shape:
            told = f"what it makes is {list(each.shape)} for {list(mask.shape)} tokens"
            raise _refusal(model, f"{told}: packed, an output of a sequence has no place")
    if not all(bool(each[mask].isfinite().all()) for each in padded):
        raise _refusal(model, "what it makes of a padded batch is not finite, so there is nothing to compare with")
    with recorded() as record:
        found = _packed_outputs(model, tokens)
    if not record.windows:
        raise _refusal(model, f"its attention does not go through transformers' interface as {NAME}")
    if record.unbounded:
        told = ", ".join(sorted({type(module).__name__ for module in record.unbounded}))
        raise _refusal(model, f"{told} gets another mask than that of the batch")
    _check_windows(model, record.windows)
    others = tokens | {"input_ids": tokens["input_ids"].clone()}
    others["input_ids"][0, : LENGTHS[0]] = tokens["input_ids"][0, : LENGTHS[0]].flip(0) + 1
    own = slice(LENGTHS[0], sum(LENGTHS))
    for mine, apart, wanted in zip(found, _outputs(model, others), padded, strict=True):
        tolerance = _tolerance(mine)
        if not torch.allclose(mine[0, own], apart[0, own], rtol=0, atol=tolerance * float(mine.abs().max())):
            raise _refusal(model, "tokens of one sequence change what it makes of another one")
        there, made = wanted[mask], packer.unpacked(mine, mask)[mask]
        worst = float((made - there).abs().max()) / max(float(there.abs().max()), 1e-30)
        if not worst <= 100 * tolerance:
            reason = "" if _takes_positions(model) else ": it takes no position_ids, so these do not begin anew"
            raise _refusal(model, f"what it makes of tokens differs by {worst:.2g} of the largest number{reason}")
    if loss is not None:
        labelled = Packer(1, None, shifted, first)(batch | {"labels": _labels(batch)})
        _check_loss(model, labelled, loss, _tolerance(found[0]))
    return shifted


def _takes_positions(model: Any) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def _check_loss(model: Any, tokens: dict[str, Tensor], wanted: Tensor, tolerance: float) -> None:
    """Check a loss.

    Args:
        tolerance: of what it follows from, which may be rounded to 16 bits where the loss is not (BLOOM).
    """
    found = model(**tokens).loss
    if not abs(float(found) - float(wanted)) <= 10 * max(tolerance, _tolerance(found)) * abs(float(wanted)):
        raise _refusal(model, f"its loss is {float(found):.6g}, and padded {float(wanted):.6g}")


def _loss_by_labels(model: Any, batch: dict[str, Tensor]) -> tuple[bool | None, Tensor | None]:
    """Say whether a model shifts labels, and return its loss of all of them; None where it has none of its own.

    Where the first token of each sequence alone has a label, a model that shifts has no token with a loss.
    """
    labels = torch.full_like(batch["input_ids"], IGNORED)
    labels[:, 0] = 1
    try:
        first, whole = (model(**batch, labels=each).loss for each in (labels, _labels(batch)))
    except Exception:  # labels are of something else than tokens, or unknown
        return None, None
    if not isinstance(first, Tensor) or not isinstance(whole, Tensor) or not bool(whole.isfinite()):
        return None, None
    return not (bool(first.isfinite()) and bool(first)), whole


def _labels(batch: dict[str, Tensor]) -> Tensor:
    """Return a label of two for each token."""
    return torch.where(batch["attention_mask"].bool(), batch["input_ids"] % 2, IGNORED)


def _tolerance(found: Tensor) -> float:
    return 1e-5 if found.dtype.itemsize > 2 else 1e-3


def _batch(model: Any) -> dict[str, Tensor]:
    """Return a padded batch of a few tokens for a model."""
    words = int(model.get_input_embeddings().weight.shape[0])
    generator = torch.Generator().manual_seed(0)
    padding = padding_token(model)
    shape = (len(LENGTHS), max(LENGTHS))
    ids = torch.randint(2, max(words - 1, 3), shape, generator=generator, device="cpu")
    ids[ids == padding] = padding + 1 if padding + 2 < words else padding - 1
    masked = getattr(model.config, "mask_token_id", None)
    if masked is not None and 0 <= masked < words:
        ids[1, LENGTHS[1] // 2] = masked  # of which a sequence has a share of its own
    mask = torch.arange(max(LENGTHS), device="cpu") < torch.tensor(LENGTHS, device="cpu")[:, None]
    ids[~mask] = padding
    device = next(model.parameters()).device
    return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}


def _outputs(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """Return what a model makes of tokens, and the last hidden states: a head may hide differences between these."""
    made = model(**batch, output_hidden_states=True)
    found = [getattr(made, name) for name in OUTPUTS if isinstance(getattr(made, name, None), Tensor)]
    if not found:
        raise _refusal(model, "it has neither logits nor hidden states")
    hidden = getattr(made, "hidden_states", None)
    return [found[0], *(hidden[-1:] if isinstance(hidden, tuple) else ())]


def _packed_outputs(model: Any, tokens: dict[str, Tensor]) -> list[Tensor]:
    """Return what a model makes of packed tokens; what it raises, it most often raises for their mask."""
    try:
        return _outputs(model, tokens)
    except InputError:
        raise
    except Exception as error:  # whatever a model raises
        use = "packed, attention_mask is for attention alone, and not 1 for tokens and 0 for padding"
        raise _refusal(model, f"{_told(error)}; {use}") from error


def _check_windows(model: Any, windows: list[int | None]) -> None:
    """Check that layers that have a window have said so: a few tokens do not show it."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or _kinds_of_gpt_neo(config)
    if kinds is None:
        has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        wanted = len(windows) if has_window else 0
    else:
        strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if strange:
            raise _refusal(model, f"it has layers of {', '.join(strange)}")
        wanted = list(kinds).count("sliding_attention")
    if sum(window is not None for window in windows) != wanted:
        told = sum(window is not None for window in windows)
        raise _refusal(model, f"by its configuration, {wanted} layers have a window; attention was told of {told}")


def _kinds_of_gpt_neo(config: Any) -> list[str] | None:
    names = {"global": "full_attention", "local": "sliding_attention"}
    given = getattr(config, "attention_layers", None)
    return None if given is None else [names.get(each, each) for each in given]


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
            device_runtime(device).forked_random(),
        ):  # fmt: skip
            model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _attention(model: Any, name: dict[str, str]) -> Iterator[None]:
    """Have a model use an implementation of attention for a while."""
    set_attention(model, name)
    try:
        yield
    finally:
        set_attention(model, NAME)
