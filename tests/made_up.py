"""A model of three operators, and made-up times for whatever could compute it."""

from collections.abc import Iterable
from pathlib import Path

from autotuner.configuration import Configuration
from autotuner.graph.autodiff import training_graph
from autotuner.models import Model, load_model, search_spaces_dir
from autotuner.records import Environment, Measurement
from autotuner.space import Space, build_space, load_space
from autotuner.tuner import build_configuration

CPU = load_space(search_spaces_dir() / "kernels" / "cpu.yaml")
HERE = Environment("cpu", "made up", (("threads", 1),))
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
