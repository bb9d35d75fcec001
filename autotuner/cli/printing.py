"""Tables of configurations, checks, devices and search spaces."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table
from rich.text import Text

from autotuner.cli.console import emit, lines, out
from autotuner.plan.phrases import plain, statistics_words

if TYPE_CHECKING:
    from autotuner.ir.models.schema import Definition
    from autotuner.measure.devices import Device
    from autotuner.plan.configuration import Configuration
    from autotuner.plan.explanation import OperatorExplanation, TensorExplanation
    from autotuner.plan.parts import Measured
    from autotuner.runtime import CheckReport
    from autotuner.solve.problem import Solution

COVERED_SETS = {"inductor": "connected sets"}


def print_configuration(found: "Configuration", *, as_json: bool, steps: bool = False) -> None:
    """Print a configuration: its longest kernels and its totals; with `steps`, every kernel and every fused set."""
    if as_json:
        emit(found.to_json())
        return
    model = found.model
    extents = " ".join(f"{axis}={extent}" for axis, extent in model.extents.items())
    out.print(Text.assemble((plain(model.reference), "bold"), plain(f" {model.dtype}  {extents}")))
    out.print(f"on {found.environment['device_name']}, {found.created_at}")
    _print_steps(found, steps)
    if steps:
        _print_fusions(found)
    _print_totals(found)
    print_doubts(found)
    if found.measured:
        print_measured(found.measured, found.kernels_us)
    if steps:
        _print_certificate(found)


def print_doubts(found: "Configuration") -> None:
    """Print why a configuration is doubtful, if it is."""
    if found.doubts:
        _print_words("doubtful: not taken for the best there is", [doubt.sentence for doubt in found.doubts])
        out.print(
            "  `autotuner tune` measures again what is doubtful, `autotuner tune --remeasure` everything.",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip


def _print_steps(found: "Configuration", every: bool) -> None:
    kernels = Table("computes", "kernel", "forms written", "us", "best us", title="chosen")
    for column in (3, 4):
        kernels.columns[column].justify = "right"
    shown = [*found.steps]
    if not every:
        shown = sorted(shown, key=lambda step: -step.predicted_us)[:12]
        kernels.title = f"the {len(shown)} longest of {len(found.steps)} chosen kernels"
    for step in shown:
        forms = ", ".join(form.split("#")[0] for _, form in step.outputs[:3]) + (" ..." if step.outputs[3:] else "")
        kernels.add_row(step.label, step.kernel, forms, f"{step.predicted_us:.1f}", f"{step.bound_us:.1f}")
    out.print(kernels)


def _print_fusions(found: "Configuration") -> None:
    fusions = Table("could be one kernel", "fastest", "us", "chosen steps, us", "", title="fused sets, by measurement")
    for column in (2, 3):
        fusions.columns[column].justify = "right"
    for fusion in found.fusions:
        verdict = "chosen" if fusion.chosen else "rejected"
        best = "none works" if fusion.best_us is None else f"{fusion.best_us:.1f}"
        fusions.add_row(" + ".join(fusion.operators), fusion.kernel, best, f"{fusion.instead_us:.1f}", verdict)
    out.print(fusions)


def _print_certificate(found: "Configuration") -> None:
    """Print how good the plan is and why it is not better, and what could still overtake it."""
    from autotuner.plan.explanation import explain_plan

    explained = explain_plan(found)
    _print_words("how good it is", explained.words)
    if explained.overtaking:
        shown = explained.overtaking
        overtaking = Table("computes", "how", "us more in all", "at least", title="what could still overtake")
        overtaking.caption = f"{len(shown)} of {explained.overtaking_count}, within the intervals of what was measured"
        for column in (2, 3):
            overtaking.columns[column].justify = "right"
        for other in shown:
            alternative = other.alternative
            extra = (f"{us:+.1f}" for us in (alternative.extra_us, alternative.extra_low_us))
            overtaking.add_row(" + ".join(alternative.operators), other.difference, *extra)
        out.print(overtaking)


def print_explanation(explained: "OperatorExplanation | TensorExplanation", *, as_json: bool) -> None:
    """Print why an operator or a tensor is what it is in a plan."""
    if as_json:
        emit(asdict(explained))
        return
    _print_words(getattr(explained, "operator", "") or getattr(explained, "tensor", ""), explained.words)


def _print_words(title: str, sentences: Iterable[str]) -> None:
    out.print(title, style="bold")
    for sentence in sentences:
        out.print(f"  {sentence}", soft_wrap=True)


def _print_totals(found: "Configuration") -> None:
    from autotuner.plan.summary import totals

    table = Table("", "", show_header=False)
    for name, text in totals(found):
        table.add_row(name, text)
    out.print(table)


def print_measured(measured: "Measured", kernels_us: float) -> None:
    """Print a training step's time end to end, and its peers'."""
    from autotuner.plan.summary import measured_totals

    table = Table("one training step", "us", "times this", title="end to end, medians, interleaved in one run")
    for total in measured_totals(measured, kernels_us):
        table.add_row(total.name, f"{total.us:,.1f}", "" if total.against is None else f"{total.against:.2f}x")
    out.print(table)


def print_solution(solution: "Solution", *, as_json: bool) -> None:
    """Print what a solver found for a problem that carries no model."""
    if as_json:
        emit({"solver": solution.solver, "total_us": solution.total_us, "lower_bound_us": solution.lower_bound_us,
              "gap": solution.gap, "statistics": dict(solution.statistics),
              "states": dict(solution.states)})  # fmt: skip
        return
    out.print(
        f"{solution.solver}: {solution.total_us:.1f} us, bound {solution.lower_bound_us:.1f}, gap {solution.gap:.2%}"
    )
    if solution.statistics:
        out.print(statistics_words(solution.statistics))
    for name, state in solution.states.items():
        out.print(f"  {name}: {state}")


def print_check(report: "CheckReport") -> None:
    """Print how far each result and each mask is from the framework's."""
    table = Table("result", "largest relative error", "allowed", "", title="against a reference in float64")
    for name, error in report.errors.items():
        own = " *" if name in report.own_bounds else ""
        table.add_row(name, f"{error:.1e}", f"{report.allowed[name]:.1e}{own}", _verdict(report.allows(name)))
    for name, mask in report.masks.items():
        kept = f"keeps {mask.share:.4f}"
        table.add_row(name, kept, f"{mask.expected:.4f} +- {mask.allowed:.4f}", _verdict(mask.ok))
    out.print(table)
    for reason in report.reasons:
        out.print(f"* {reason}", soft_wrap=True)


def _verdict(ok: bool) -> Text:
    return Text("ok") if ok else Text("WRONG", "red")


def print_devices(devices: "Iterable[Device]") -> None:
    table = Table("type", "name")
    for device in devices:
        table.add_row(device.device_type, device.name)
    out.print(table)


def print_models(definitions: "Mapping[str, Definition]") -> None:
    """Print the presets and options of models, by name."""
    models = Table("model", "presets", "options", title="models")
    for name, definition in definitions.items():
        presets = [f"{p}: {' '.join(f'{a}={n}' for a, n in e.items())}" for p, e in definition.presets.items()]
        options = [f"{o}={v.default}" for o, v in definition.options.items()]
        models.add_row(name, lines(presets), lines(options))
    out.print(models)


def print_kernels(name: str, described: Mapping[str, Any]) -> None:
    """Print a search space, as `autotuner.space.describe` returns it."""
    kernels = Table(Column("kernel", overflow="fold"), "covers", "layouts", "parameters", title=f"kernels on {name}")
    for kernel, entry in described["kernels"].items():
        params = " ".join(f"{p}={v}" for p, v in entry["params"].items())
        if entry["cells"] == "sampled":
            params += f"; sampled: {entry['tried']:,} of {entry['combinations']:,}"
        covers = " + ".join(entry["covers"]) or COVERED_SETS.get(kernel, "siblings, stacked")
        kernels.add_row(kernel, covers, entry["layouts"], params)
    out.print(kernels)
