"""A small model of several element types: float32 residuals and parameters around products in bfloat16."""

from collections.abc import Mapping
from typing import Any

from autotuner.ir.models import Model, ModelFile
from autotuner.ir.models.schema import parse_definition

EXTENTS = {"b": 2, "l": 4, "h": 8, "f": 16}


def operator(name: str, kind: str, spec: str, *inputs: str, made: tuple[str, ...] = (), **attributes: Any) -> Any:
    return {"name": name, "kind": kind, "spec": spec, "inputs": list(inputs), "outputs": list(made or (name,)),
            "attributes": attributes}  # fmt: skip


def definition(low: str = "bfloat16") -> dict[str, Any]:
    """Return a feed-forward part as autocast has it: weights are cast, and the sum and its norm are in float32."""
    return {
        "version": 1,
        "name": "mixed",
        "axes": {"b": "batch", "l": "position", "h": "hidden", "f": "wide"},
        "inputs": {"x": {"axes": "blh"}},
        "parameters": {"up": "fh", "up_bias": "f", "down": {"axes": "hf", "dtype": low}, "scale": "h", "shift": "h"},
        "operators": [
            operator("x_low", "cast", "blh->blh", "x", dtype=low),
            operator("up_low", "cast", "fh->fh", "up", dtype=low),
            operator("up_bias_low", "cast", "f->f", "up_bias", dtype=low),
            operator("wide", "contraction", "blh,fh->blf", "x_low", "up_low"),
            operator("biased", "bias", "blf,f->blf", "wide", "up_bias_low"),
            operator("active", "gelu_tanh", "blf->blf", "biased"),
            operator("narrow", "contraction", "blf,hf->blh", "active", "down"),
            operator("mask", "dropout_mask", "->blh", p=0.25),
            operator("dropped", "dropout", "blh,blh->blh", "narrow", "mask", p=0.25),
            operator("high", "cast", "blh->blh", "dropped", dtype="float32"),
            operator("sum", "add", "blh,blh->blh", "high", "x"),
            operator("y", "layer_norm", "blh,h,h->blh,bl,bl", "sum", "scale", "shift",
                     made=("y", "mean", "deviation"), epsilon=1e-5),
        ],
        "outputs": ["y"],
    }  # fmt: skip


def mixed(low: str = "bfloat16", extents: Mapping[str, int] = EXTENTS) -> Model:
    return ModelFile("mixed", parse_definition(definition(low), "mixed")).instantiate(extents=extents)
