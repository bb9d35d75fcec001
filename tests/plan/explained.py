"""A configuration of the small model with everything that there is to explain; its numbers are small and made up.

Seven steps take 42 us: the product stays 2 us and the weight's gradient 1.5 us above its own best, and one conversion
takes 2 us. The bound is 40 us.
"""

from dataclasses import replace

from autotuner.ir.models import Model
from autotuner.plan.configuration import Configuration
from autotuner.plan.parts import Fusion, Measured, Memory
from autotuner.plan.step import Alternative, Step
from tests.made_up import made_up_configuration

Forms = tuple[tuple[str, str], ...]
READS_X: Forms = (("x", "bh"), ("weight", "fh"))
TURNED = Alternative(("product",), "torch_matmul", (), READS_X, (("product", "fb"),), 3.1, -0.4, 8.5)
TOGETHER = Alternative(
    ("product", "biased"), "torch_matmul_bias", (), (*READS_X, ("offset", "f")), (("biased", "fb"),), 4.0, 2.0, 12.0
)


def _step(
    operators: tuple[str, ...],
    phase: str,
    inputs: Forms,
    outputs: Forms,
    kernel: str,
    us: tuple[float, float, float, float],
    alternative: Alternative | None = None,
) -> Step:
    """Return a step; `us` are its predicted time, its bound, and the ends of its interval."""
    predicted, bound, low, high = us
    return Step(
        operators=operators, recomputed=(), phase=phase, inputs=inputs, outputs=outputs, kernel=kernel, params=(),
        adjacent=(), predicted_us=predicted, bound_us=bound, low_us=low, high_us=high, alternative=alternative,
    )  # fmt: skip


STEPS = (
    _step(("product",), "forward", READS_X, (("product", "bf"),), "torch_matmul", (10.0, 8.0, 9.0, 11.5), TURNED),
    _step(("biased", "y"), "forward", (("product", "bf"), ("offset", "f")), (("biased", "bf"), ("y", "bf")),
          "inductor", (6.0, 6.0, 6.0, 6.0), TOGETHER),
    _step(("grad_biased",), "backward", (("grad_y", "bf"), ("biased", "bf")), (("grad_biased", "bf"),),
          "torch_gelu_erf_grad", (5.0, 5.0, 4.5, 5.5)),
    _step((), "backward", (("grad_biased", "bf"),), (("grad_biased", "fb"),), "torch_copy", (2.0, 0.0, 1.5, 2.5)),
    _step(("grad_offset",), "backward", (("grad_biased", "fb"),), (("grad_offset", "f"),), "torch_bias_grad",
          (3.0, 3.0, 3.0, 3.0)),
    _step(("grad_x",), "backward", (("grad_biased", "bf"), ("weight", "fh")), (("grad_x", "bh"),), "torch_matmul",
          (7.0, 7.0, 6.5, 8.0)),
    _step(("grad_weight",), "backward", (("grad_biased", "bf"), ("x", "bh")), (("grad_weight", "fh"),),
          "torch_matmul", (9.0, 7.5, 8.0, 10.0)),
)  # fmt: skip
FUSIONS = (
    Fusion(("biased", "y"), "inductor", 6.0, 6.0, chosen=True, alone_us=9.5),
    Fusion(("product", "biased"), "torch_matmul_bias", 11.0, 13.0, chosen=False, alone_us=12.5),
    Fusion(("grad_biased", "grad_offset"), "", None, 8.0, chosen=False),
)
KIB = 1024


def explained_configuration(model: Model) -> Configuration:
    """Return a configuration of the small model whose every field that can be filled is."""
    made = made_up_configuration(model)
    certificate = replace(
        made.certificate, predicted_us=42.0, lower_bound_us=40.0, proven_gap=0.05, estimated_gap=0.01, low_us=38.5,
        high_us=46.5, baseline_us=50.0, default_us=60.0, noise_floor=0.01, statistics={"largest_rows": 12, "cases": 1},
    )  # fmt: skip
    return replace(
        made, steps=STEPS, fusions=FUSIONS, certificate=certificate, overtaking=(TURNED,),
        memory=Memory(64 * KIB, 20 * KIB, 40 * KIB),
        measured=Measured(50.0, 6.0, {"eager": 100.0}, 30, 39 * KIB, {"eager": 80 * KIB}),
    )  # fmt: skip


def with_again(configuration: Configuration) -> Configuration:
    """Return it with the product computed a second time in backward, for a reader that finds it there."""
    product, biased, grad, *rest = configuration.steps
    again = replace(product, phase="backward", outputs=(("again product", "bf"),), again=True)
    reader = replace(grad, inputs=(*grad.inputs, ("again product", "bf")))
    return replace(configuration, steps=(product, biased, again, reader, *rest))
