"""Small models, and made-up times for whatever could compute them."""

from collections.abc import Iterable
from pathlib import Path

import yaml

from autotuner.ir.autodiff import training_graph
from autotuner.ir.models import Model, load_model, search_spaces_dir
from autotuner.ir.records import Environment, Measurement
from autotuner.plan.configuration import Configuration
from autotuner.space import Space, build_space, load_space
from autotuner.tuner import build_configuration
from autotuner.tuner.policy import TuningPolicy

CPU = load_space(search_spaces_dir() / "kernels" / "cpu.yaml")
HERE = Environment("cpu", "made up", (("threads", 1),))
UNEXPLAINED = TuningPolicy(explaining_s=0.0)
"""Plans for what only runs them: looking for alternatives takes longer than all else."""
LINEAR = """
version: 1
name: linear
axes: {b: batch, h: hidden, f: features}
inputs: {x: {axes: bh}}
parameters: {weight: fh, offset: f}
operators:
  - {name: product, kind: contraction, spec: "bh,fh->bf", inputs: [x, weight], outputs: [product]}
  - {name: y, kind: bias, spec: "bf,f->bf", inputs: [product, offset], outputs: [y]}
outputs: [y]
"""
LAYER = """
version: 1
name: small
axes: {b: batch, h: hidden, f: features}
presets:
  wide: {b: 2, h: 3, f: 4}
inputs: {x: {axes: bh}}
parameters: {weight: fh, offset: f}
operators:
  - {name: product, kind: contraction, spec: "bh,fh->bf", inputs: [x, weight], outputs: [product]}
  - {name: biased, kind: bias, spec: "bf,f->bf", inputs: [product, offset], outputs: [biased]}
  - {name: y, kind: gelu_erf, spec: "bf->bf", inputs: [biased], outputs: [y]}
outputs: [y]
"""
FEED_FORWARD = """
version: 1
name: feed-forward
axes: {b: row, h: hidden, f: feature}
presets:
  small: {b: 6, h: 8, f: 12}
inputs: {x: {axes: bh}}
parameters: {weight1: fh, bias1: f, weight2: hf, bias2: h, scale: h, shift: h}
operators:
  - {name: product1, kind: contraction, spec: "bh,fh->bf", inputs: [x, weight1], outputs: [product1]}
  - {name: biased1, kind: bias, spec: "bf,f->bf", inputs: [product1, bias1], outputs: [biased1]}
  - {name: active, kind: gelu_erf, spec: "bf->bf", inputs: [biased1], outputs: [active]}
  - {name: product2, kind: contraction, spec: "bf,hf->bh", inputs: [active, weight2], outputs: [product2]}
  - {name: biased2, kind: bias, spec: "bh,h->bh", inputs: [product2, bias2], outputs: [biased2]}
  - {name: residual, kind: add, spec: "bh,bh->bh", inputs: [biased2, x], outputs: [residual]}
  - name: y
    kind: layer_norm
    spec: bh,h,h->bh,b,b
    inputs: [residual, scale, shift]
    outputs: [y, y_mean, y_reciprocal_deviation]
    attributes: {epsilon: 1.0e-5}
outputs: [y]
"""


def feed_forward(folder: Path) -> Path:
    """Write the larger model's file into a folder and return its path; it takes seconds to tune without compilers."""
    path = folder / "feed_forward.yaml"
    path.write_text(FEED_FORWARD)
    return path


def without_compilers(folder: Path) -> Path:
    """Write the CPU's search space without the kernels that compile, which would take most of the time."""
    space = yaml.safe_load((search_spaces_dir() / "kernels" / "cpu.yaml").read_text())
    space["kernels"] = {name: entry for name, entry in space["kernels"].items() if not name.startswith("inductor")}
    path = folder / "cpu.yaml"
    path.write_text(yaml.safe_dump(space))
    return path


def small_model(folder: Path) -> Model:
    """Return the model, read from a file that is written into a folder."""
    path = folder / "small.yaml"
    path.write_text(LAYER)
    return load_model(str(path)).instantiate("wide")


def space_of(model: Model) -> Space:
    return build_space(training_graph(model.graph()), CPU)


def times(keys: Iterable[str]) -> dict[str, Measurement]:
    """Return a time for each call: 1 to 100 microseconds, by its key."""
    return {key: Measurement("ok", median_us=1.0 + int(key[:8], 16) % 100) for key in keys}


def made_up_configuration(model: Model) -> Configuration:
    space = space_of(model)
    return build_configuration(model, space, times(space.calls), HERE, {"calls": len(space.calls)})
