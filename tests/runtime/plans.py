"""Configurations without measuring: a space with made-up costs, solved."""

import random
from collections.abc import Callable, Mapping
from typing import Any

from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import Model, load_model, search_spaces_dir
from autotuner.ir.records import Environment, Measurement, canonical_json
from autotuner.plan.configuration import Configuration
from autotuner.space import Choice, Space, build_space, load_space
from autotuner.tuner import build_configuration
from tests.made_up import UNEXPLAINED

TINY = {"b": 2, "l": 6, "h": 8, "n": 2, "p": 4, "f": 12}
ODD = {"b": 3, "l": 5, "h": 21, "n": 3, "p": 7, "f": 11}
WIDER = {"b": 2, "l": 64, "h": 64, "n": 2, "p": 32, "f": 128}
WITH_DROPOUT = 0.3
KEPT_SHARE = 0.35
SITES = ("attention_dropout", "output_dropout", "activation_dropout", "feed_forward_dropout")

_FILE = load_model("bert-encoder")
_SPACES: dict[tuple[str, tuple[str, ...], str], Space] = {}
# On CUDA, what needs more than torch itself, or is not for every element type, is left to the tests of kernels.
_LEFT_OUT: dict[str, tuple[str, ...]] = {
    "cpu": (),
    "cuda": (
        "inductor",
        "cupy_",
        "triton_",
        "cublaslt_",
        "cuda_flash_attention",
        "cudnn_attention",
        "cuda_efficient_attention",
    ),
}
_CONFIGURATIONS: dict[tuple[str, int, str], Configuration] = {}


def model(extents: Mapping[str, int] | None = None, *, dtype: str = "float64", p: float = 0.0, **options: Any) -> Model:
    """Return an encoder layer's model; every dropout has the same p unless options say otherwise."""
    return _FILE.instantiate(extents=extents or TINY, dtype=dtype, options=dict.fromkeys(SITES, p) | options)


MASKED = model(attention_mask=True, activation="gelu_tanh")


def space(of: Model, also: tuple[str, ...] = (), device_type: str = "cpu") -> Space:
    """Return a model's space; what is left out otherwise, such as Inductor, which compiles for seconds, only if asked.

    Args:
        also: beginnings of kernels' names.
    """
    graph = training_graph(of.graph())
    key = (graph.key, also, device_type)
    if key not in _SPACES:
        file = load_space(search_spaces_dir() / "kernels" / f"{device_type}.yaml")
        kernels = {
            name: entry
            for name, entry in file.kernels.items()
            if name.startswith(also) or (name != "inductor" and not name.startswith(_LEFT_OUT[device_type]))
        }
        _SPACES[key] = build_space(graph, file.model_copy(update={"kernels": kernels}))
    return _SPACES[key]


def configuration(of: Model, seed: int = 0, device_type: str = "cpu") -> Configuration:
    """Return the cheapest whole for random costs; solved once per graph, seed and type of device."""
    key = (canonical_json(of.to_json()), seed, device_type)
    if key not in _CONFIGURATIONS:
        _CONFIGURATIONS[key] = solved(of, seed, device_type=device_type)
    return _CONFIGURATIONS[key]


def in_bfloat16(activation: str, *, p: float = 0.0, extents: Mapping[str, int] = WIDER) -> Configuration:
    """Return a layer in bfloat16: compiled norms, since torch's are none in bfloat16, and torch's own kernels else."""

    def cost(choice: Choice) -> float | None:
        return 1e4 * len(choice.cover.operators) if choice.candidate.kernel == "inductor" else None

    return solved(model(extents, dtype="bfloat16", activation=activation, p=p), 0, cost=cost, also=("inductor",))


def solved(
    of: Model,
    seed: int,
    *,
    cost: Callable[[Choice], float | None] = lambda _: None,
    also: tuple[str, ...] = (),
    device_type: str = "cpu",
) -> Configuration:
    """Return the cheapest whole for random costs, except where `cost` says one.

    A cover of many operators would win nearly always, so a choice costs a random share of its number of operators.
    Most choices are left out at random, which keeps solving short; those with every tensor as declared stay, so that
    there is always a whole.
    """
    found = space(of, also, device_type)
    draw = random.Random(seed)
    costs = {conversion.call.key: draw.uniform(1, 20) for conversion in found.conversions}
    for choice in found.choices:
        given, us = cost(choice), draw.uniform(1, 100) * len(choice.cover.operators)
        declared = all(text == found.graph.tensors[name].axes for name, text in choice.by_tensor.items())
        if given is not None or declared or draw.random() < KEPT_SHARE:
            costs[choice.call.key] = us if given is None else given
    known = {key: Measurement("ok", median_us=us) for key, us in costs.items()}
    return build_configuration(of, found, known, Environment(device_type, "made up", ()), {}, policy=UNEXPLAINED)
