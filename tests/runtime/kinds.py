"""Each kind of layer that can be tuned with a plan of each kind, beside an untouched copy."""

import copy
import gzip
import json
from functools import cache
from pathlib import Path

import pytest
from torch import nn

from autotuner.plan.configuration import Configuration
from autotuner.runtime import TunedModule
from autotuner.runtime.framework import encoder_layer
from tests.runtime.bert_layers import bert_layer
from tests.runtime.layers import tuned
from tests.runtime.plans import configuration, model

KINDS = ("encoder", "bert", "interleaved encoder", "interleaved bert")


@cache
def interleaved() -> Configuration:
    """Return a plan that was written when plans could ask for parameters of other strides.

    The query, key and value weights lie as `h*np@0/3`: their elements alternate in one buffer.
    """
    path = Path(__file__).parents[1] / "data" / "configuration_interleaved_weights.json.gz"
    return Configuration.from_json(json.loads(gzip.decompress(path.read_bytes())), path.name)


def pair(kind: str, seed: int = 4, device: str = "cpu") -> tuple[TunedModule, nn.Module]:
    """Return a tuned layer and an untouched copy of what it was made from."""
    layer = (bert_layer() if kind.endswith("bert") else encoder_layer(model())).to(device)
    twin = copy.deepcopy(layer)
    if kind.startswith("interleaved") and device != "cpu":
        pytest.skip("the interleaved plan is one of the CPU's kernels")
    plan = interleaved() if kind.startswith("interleaved") else configuration(model(), seed, device)
    return tuned(layer, plan), twin
