"""State that the modules of a model keep between calls: attributes of Python, and buffers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

LISTED = ("_parameters", "_modules")
"""Attributes of every module that a call leaves as they are."""


class ModuleState:
    """Attributes and names of buffers of all modules, as they were when this was made.

    Lists, mappings and sets are kept with their elements; what an element holds is not looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        self._of = {
            name: (module, {key: (value, _copied(value)) for key, value in vars(module).items() if key not in LISTED})
            for name, module in model.named_modules()
        }

    def replaced(self) -> dict[str, Tensor]:
        """Return tensors that are attributes now and were not then, by their names: not those of buffers."""
        return {
            f"{name}.{key}".removeprefix("."): value.detach()
            for name, (module, before) in self._of.items()
            for key, value in vars(module).items()
            if isinstance(value, Tensor) and (key not in before or before[key][0] is not value)
        }

    def restore(self) -> None:
        """Have modules keep what they kept."""
        for module, before in self._of.values():
            own = vars(module)
            for key in own.keys() - before.keys() - set(LISTED):
                del own[key]
            for key, (value, copied) in before.items():
                own[key] = value
                if copied is not None:
                    _refill(value, copied)


def unlike(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], share: float) -> str | None:
    """Return the name of a tensor that differs by more than a share of its largest element, or None.

    Tensors of other shapes are not compared, such as what a module keeps of the tokens of its last batch.
    """
    for name, one in wanted.items():
        other = found.get(name)
        if other is None or other.shape != one.shape or not one.numel():
            continue
        a, b = (each.to(torch.float64) for each in (one, other))
        if not bool(((a - b).abs().max() <= share * a.abs().max()).item()):
            return name
    return None


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, list | dict | set) else None


def _refill(value: Any, elements: Any) -> None:
    """Put elements back into a list, mapping or set, unless they are there in order."""
    now = [*value.items()] if isinstance(value, dict) else [*value]
    then = [*elements.items()] if isinstance(value, dict) else [*elements]
    if len(now) == len(then) and all(_same(a, b) for a, b in zip(now, then, strict=True)):
        return
    value.clear()
    if isinstance(value, list):
        value.extend(elements)
    else:
        value.update(elements)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2:
        return all(a is b for a, b in zip(one, other, strict=True))
    return one is other
