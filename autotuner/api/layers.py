"""Models by their names, as they are, and of layers whose class is known."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autotuner.errors import InputError, ModelError
from autotuner.ir.models import Model, load_model, named_model
from autotuner.ir.records import Scalar

if TYPE_CHECKING:
    from torch import nn


def as_model(
    model: "str | Model | nn.Module",
    extents: Mapping[str, int] | None,
    options: Mapping[str, Scalar] | None,
    dtype: str | None,
    mode: str = "train",
) -> Model:
    """Return a model by its name, as it is, or of a layer whose class is known.

    Raises:
        ModelError: the layer is of another class, or the extents do not fit it.
        InputError: the mode is unknown.
    """
    if mode not in ("train", "eval"):
        raise InputError(f'mode is {mode!r}: give "train" or "eval"')
    if mode == "eval" and isinstance(model, str | Model):
        raise InputError(f"{model!r} has no mode: set the options of its dropout to 0, or give a module")
    if isinstance(model, Model):
        return model
    if isinstance(model, str):
        return named_model(model, extents=extents, options=options, dtype=dtype)
    from autotuner.runtime import DROPOUTS, describe

    name, found, read, own_dtype = describe(model)
    if mode == "eval":
        read = {option: 0.0 if option in DROPOUTS else value for option, value in read.items()}
    missing = [axis for axis in ("b", "l") if axis not in (extents or {})]
    if missing:
        raise ModelError(f"a module does not say how large its batches are: give extents for {' and '.join(missing)}")
    for axis, extent in (extents or {}).items():
        if axis in found and extent != found[axis]:
            raise ModelError(f"extents give {axis}={extent}, and the module's own is {found[axis]}: leave it out")
    return load_model(name).instantiate(
        None, extents={**found, **(extents or {})}, options={**read, **(options or {})}, dtype=dtype or own_dtype
    )
