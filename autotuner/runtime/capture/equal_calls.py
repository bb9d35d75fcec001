"""Calls of ATen, and of transformers, in place of which programs hold equal ones.

sort, argsort                        stable ones, so that all who sort the same numbers get the same order
empty, empty_like, new_empty         zeros, since nothing reads what is not written
transformers.grouped_mm_fallback     aten._grouped_mm
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autotuner.runtime.capture.axes import UnknownError
from autotuner.runtime.capture.reader import aten
from autotuner.runtime.devices import device_runtime

Called = tuple[Any, tuple[Any, ...], dict[str, Any]]

GROUPED = aten._grouped_mm.default
_FALLBACK = "transformers::grouped_mm_fallback"
_ZEROS = {
    aten.empty_like.default: aten.zeros_like.default,
    aten.empty.memory_format: aten.zeros.default,
    aten.new_empty.default: aten.new_zeros.default,
}
_WRITTEN: Mapping[Any, Callable[..., Called]] = {
    aten.sort.default: lambda x, dim=-1, descending=False: _stable(aten.sort.stable, x, dim, descending),
    aten.argsort.default: lambda x, dim=-1, descending=False: _stable(aten.argsort.stable, x, dim, descending),
}


def equal_call(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Called:
    """Return the call that a program holds in place of another one; most often that is the call itself.

    Args:
        result: torch's example of what it makes.

    Raises:
        UnknownError: it is a grouped product for whose sizes the host waits.
    """
    if target is aten.type_as.default:
        return aten._to_copy.default, args[:1], {"dtype": result.dtype}
    if target in _ZEROS:
        return _ZEROS[target], args, {key: each for key, each in kwargs.items() if key != "memory_format"}
    if target in _WRITTEN:
        return _WRITTEN[target](*args, **kwargs)
    if target is GROUPED or (getattr(target, "_schema", None) is not None and target._schema.name == _FALLBACK):
        return _grouped(result, *args, **kwargs)
    return target, args, dict(kwargs)


def _stable(target: Any, x: Any, dim: int, descending: bool) -> Called:
    return target, (x,), {"stable": True, "dim": dim, "descending": descending}


def _grouped(result: Tensor, rows: Any, matrices: Any, offs: Any = None, bias: Any = None,
             out_dtype: torch.dtype | None = None) -> Called:  # fmt: skip
    if offs is None or bias is not None or out_dtype not in (None, result.dtype):
        raise UnknownError("a grouped product without groups, or with a bias or a type of its own")
    if device_runtime(result.device).has_graphs and result.dtype != torch.bfloat16:
        raise UnknownError(f"a grouped product in {result.dtype}, for whose sizes the host waits; bfloat16 needs none")
    if result.ndim != 2:
        raise UnknownError("a grouped product that makes a matrix for each group")
    return GROUPED, (rows, matrices, offs), {}
