"""Layers on CUDA: one case of the benchmark, and the page of results."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from autotuner.ir.cost import moved_bytes, operator_flop, reduction
from autotuner.measure.roofline import Ladder, Roofline
from autotuner.plan.configuration import Configuration
from autotuner.plan.step import tensor_of
from autotuner.runtime.check import compare
from autotuner.runtime.fallbacks import warn
from autotuner.runtime.peers.on_gpu import CAPTURED, COMPILED, OURS, PLAN
from scripts.bench import errors, layer_cuda_dram
from scripts.bench.all_peers import EAGER, LEFT_OUT, fast_kernels, time_all_peers
from scripts.bench.cases import CASES, Case
from scripts.bench.errors import measured_errors
from scripts.bench.in_the_step import in_the_step_us
from scripts.bench.profiled_sides import TUNED
from scripts.pages import Stages, mib, table

FLOORS = {"floor": "floor_us", "of products": "compute_floor_us", "of bytes": "bytes_floor_us"}


def case_row(
    case: Case,
    found: Configuration,
    samples: int,
    stages: Stages,
    *,
    max_autotune: str = "aten",
    jax: bool = True,
    with_errors: bool = True,
) -> dict[str, Any]:
    """Check a configuration, time it and all its peers, and compare errors; return one row of results.

    Peers that compute less than the model asks for are timed, and no ratio is formed with them.

    Raises:
        ValueError: the configuration's results differ from the framework's.
    """
    with stages("check"):
        comparison = compare(found)
        report = comparison.report()
    if not report.ok:
        raise ValueError(f"results differ from the framework's: {report}")
    timed = time_all_peers(case.make, found, samples, max_autotune=max_autotune, jax=jax, stages=stages)
    measured = timed.measured
    peer = min(measured.peers_us, key=measured.peers_us.__getitem__)
    kernels = fast_kernels({**timed.left_out_us, **measured.peers_us}, COMPILED)
    of_sides = {}
    if with_errors:
        try:
            with stages("errors"):
                of_sides = measured_errors(case.make, found, comparison, next(iter(kernels), None))
        except Exception as error:
            warn(f"{case.name}: no table of errors: {error}")
    with stages("in place"):
        in_place_us = in_the_step_us(found)
    graph = found.graph()
    flop = sum(operator_flop(graph, operator) for operator in graph.operators if operator.kind == "contraction")
    return {
        "case": case.name,
        "layer": case.layer,
        "model": found.model.name,
        "dtype": found.model.dtype,
        "options": dict(found.model.options),
        "extents": dict(found.model.extents),
        "timings": {name: asdict(timing) for name, timing in timed.by_side.items()},
        "left_out_us": dict(timed.left_out_us),
        "tuned_us": measured.plan_us,
        "best_peer": peer,
        "ratio_to_best_peer": measured.ratios[peer],
        "predicted_us": found.certificate.predicted_us,
        "overhead_us": measured.overhead_us,
        "switching_us": measured.switching_us,
        "slowdown": measured.slowdown,
        "predicted_over_measured": measured.predicted_over_measured(found.kernels_us),
        "lower_bound_us": found.certificate.lower_bound_us,
        "default_us": found.certificate.default_us,
        "contraction_flop": flop,
        "bytes_moved": dict(found.bytes_moved),
        "bytes_reduction_percent": reduction(found.bytes_moved["unfused"], found.bytes_moved["chosen"]),
        "planned_peak_bytes": found.memory.peak_bytes if found.memory else None,
        "held_bytes": found.memory.held_bytes if found.memory else None,
        "calls": dict(found.counts),
        "steps": step_rows(found, in_place_us),
        "overlap": asdict(found.overlap) if found.overlap else None,
        "errors": of_sides,
        "dram": None,
        "seconds": stages.seconds,
    }


def step_rows(found: Configuration, in_place_us: Sequence[float] | None = None) -> list[dict[str, Any]]:
    """Return each step's operators, kernel, times, flop and bytes; given are its times inside of the whole step."""
    in_place: Sequence[float | None] = in_place_us or [None] * len(found.steps)
    graph = found.graph()
    named = {operator.name: operator for operator in graph.operators}
    return [
        {
            "operators": list(step.operators) or ["conversion"],
            "kernel": step.kernel,
            "phase": step.phase,
            "predicted_us": step.predicted_us,
            "bound_us": step.bound_us,
            "flop": sum(operator_flop(graph, named[n]) for n in step.operators if named[n].kind == "contraction"),
            "counted_bytes": moved_bytes(
                graph, [[(tensor_of(name), form) for name, form in step.inputs + step.outputs]]
            ),
            "dram_bytes": None,
            "in_place_us": us,
        }
        for step, us in zip(found.steps, in_place, strict=True)
    ]


def with_dram(row: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return a row with what the profiler counted for it."""
    steps = [step | {"dram_bytes": found["steps"].get(number)} for number, step in enumerate(row["steps"])]
    return row | {"steps": steps, "dram": {name: found[name] for name in ("sides", "reason")}}


def plan_of(row: dict[str, Any], found: Configuration) -> dict[str, Any]:
    """Return what the profiler's program needs of a case."""
    return {"layer": row["layer"], "peer": row["best_peer"].removesuffix(CAPTURED), "configuration": found.to_json()}


def about() -> dict[str, Any]:
    """Return what was measured on, beside the environment's facts."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "device_name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "torch": torch.__version__,
    }


def page(about: dict[str, Any], cases: list[dict[str, Any]]) -> str:
    cases = sorted(cases, key=lambda row: [*CASES].index(row["case"]))
    lines = [
        "# Layers on a GPU",
        "",
        f"{about['device_name']} ({about['multiprocessors']} multiprocessors), driver {about['driver']}, CUDA "
        f"{about['cuda']}, cuDNN {about['cudnn']}, torch {about['torch']}, triton {about['triton']}.",
        "",
        "One training step (forward, backward, all gradients), milliseconds, all sides interleaved in one run; all "
        "drop their gradients before each step. Captured: the whole step as one CUDA graph. Ratio: the fastest peer "
        "over the tuned layer, captured; above 1, the tuned layer is faster. Sides of JAX's are timed by the "
        "host's clock, from idle to idle; their peak is XLA's plan of results and temporaries.",
        "",
        *table(
            (
                *("case", "tuned", "fastest peer", "", "ratio", "predicted", *FLOORS, "bytes moved"),
                *("DRAM, eager", "DRAM, peer", "error"),
            ),
            (
                (
                    row["case"],
                    ms(row["tuned_us"]),
                    ms(row["timings"][row["best_peer"]]["median_us"]),
                    row["best_peer"],
                    f"**{row['ratio_to_best_peer']:.2f}**",
                    f"{row['predicted_over_measured']:+.1%}",
                    *(ms(row[name]) for name in FLOORS.values()),
                    f"{-row['bytes_reduction_percent']:+.1f} %",
                    *dram_shares(row),
                    over_eager(row),
                )
                for row in cases
            ),
        ),
        "",
        "Predicted: the sum of the kernels' own timings, less what overlap saves, with what lies beside the kernels, "
        "against what was measured; each case has its parts. Where load that lasts brings the device to its power "
        "limit, its clock falls, and steps take longer than kernels that were timed in short rounds: see SM clock, the "
        "median of a side's turns, where it was read. Bytes moved: against every operator alone. DRAM: what the "
        "profiler counts for the tuned layer, against eager's and against the fastest peer's. Error: against float64, "
        "the largest multiple of eager's own among output and gradients.",
        "",
        "Floor: what the plan's steps take at least, each for its products or for the bytes that it reads and writes, "
        "whichever is more; the sums of either alone beside it. They follow from the device's ceilings, which were "
        f"measured as kernels are ({about['ceilings_run']['date']}, commit {about['ceilings_run']['commit']}; at the "
        f"largest amounts: {rates(about['ceilings'])}), lowered where a step took less.",
    ]
    for row in cases:
        ran = row["run"]
        lines += ["", f"## {row['case']}", "", f"{ran['date']}, commit {ran['commit']}. `{ran['command']}`", ""]
        lines += [layer(row), "", extents(row), ""]
        best = row["tuned_us"]
        lines += table(
            ("side", "median", "least", "over tuned", "SM clock, MHz", "peak, MiB"),
            (
                (
                    f"tuned: {name}" if name in OURS else name,
                    f"{timing['median_us'] / 1e3:.4f}",
                    f"{timing['least_us'] / 1e3:.4f}",
                    f"{timing['median_us'] / best:.2f}",
                    mhz(timing.get("sm_clock_mhz")),
                    mib(timing["peak_bytes"]),
                )
                for name, timing in sorted(row["timings"].items(), key=lambda item: item[1]["median_us"])
            ),
        )
        less = [name for name, timing in row["timings"].items() if timing["computes_less"]]
        if less:
            lines += ["", f"No peer, because it computes less than the model asks for: {'; '.join(less)}."]
        if row["left_out_us"]:
            slow = (f"{name} {ms(us)}" for name, us in sorted(row["left_out_us"].items(), key=lambda item: item[1]))
            lines += ["", "Timed no further after a first look, in which they took more than "
                      f"{LEFT_OUT:g} times as long as the fastest peer: {'; '.join(slow)}."]  # fmt: skip
        if row["errors"]:
            lines += ["", *errors.lines(row["errors"])]
        lines += ["", *dram(row)]
        if row.get("overlap"):
            lines += ["", overlap(row["overlap"])]
        lines += ["", *predicted(row)]
        lines += ["", "Steps of the plan, microseconds. In place: inside of the whole step, one step after the other. "
                  "Best: the fastest measured for the same work in any forms.", ""]  # fmt: skip
        lines += table(
            ("step", "kernel", "predicted", "in place", "best", *FLOORS, "counted, MiB", "DRAM, MiB"),
            (
                (
                    " + ".join(step["operators"]),
                    step["kernel"],
                    f"{step['predicted_us']:.1f}",
                    "" if step.get("in_place_us") is None else f"{step['in_place_us']:.1f}",
                    *(f"{step[name]:.1f}" for name in ("bound_us", *FLOORS.values())),
                    *(mib(step[k]) for k in ("counted_bytes", "dram_bytes")),
                )
                for step in row["steps"]
            ),
        )
        spent = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["seconds"].items())
        lines += ["", f"Seconds of this case: {spent}."]
    return "\n".join(lines) + "\n"


def predicted(row: dict[str, Any]) -> list[str]:
    """Return the lines on what a step was predicted to take, part by part."""
    if "slowdown" not in row:
        return []
    gain = row["overlap"]["gain_us"] if row["overlap"] else 0.0
    parts = (
        ("the steps' own timings", row["predicted_us"]),
        ("less what overlap saves", -gain),
        ("copies of inputs and parameters, autograd", row["overhead_us"]),
        (f"{len(row['steps'])} kernels behind other kernels", row["switching_us"]),
    )
    total = sum(us for _, us in parts)
    slower = (row["slowdown"] - 1) * total
    rows = [*parts, (f"load that lasts, {row['slowdown'] - 1:+.1%}", slower), ("predicted", total + slower)]
    measured = ("measured, captured", row["timings"][PLAN + CAPTURED]["median_us"])
    return [*table(("of a step", "microseconds"), ((name, f"{us:.1f}") for name, us in (*rows, measured)))]


def overlap(found: dict[str, Any]) -> str:
    """Return the sentence on steps that run beside the others."""
    branches = "; ".join(", ".join(str(number + 1) for number in branch) for branch in found["branches"])
    return (
        f"Overlap, steps of the table below by stream beside the others: {branches}. On the whole plan that saves "
        f"{found['gain_us']:.1f} us ({found['low_us']:.1f} to {found['high_us']:.1f})."
    )


def dram(row: dict[str, Any]) -> list[str]:
    """Return the lines on what went through DRAM."""
    if row["dram"] is None:
        return ["Bytes through DRAM were not counted."]
    said = layer_cuda_dram.lines(row["dram"])
    sides = row["dram"]["sides"]
    if TUNED in sides:
        moved = row["bytes_moved"]["chosen"]
        through = layer_cuda_dram.totals_of(sides)[TUNED]
        share = 1 - through / moved
        said += ["", f"The tuned layer's kernels read and write {mib(moved)} MiB, counted by their operands, and "
                 f"{mib(through)} MiB go through DRAM: {abs(share):.0%} {'less' if share > 0 else 'more'}. What the "
                 "second-level cache keeps need not go there; a kernel's own workspace is no operand; and what a step "
                 "leaves in the cache is written during a later one, so single steps may move more."]  # fmt: skip
    return said


def dram_shares(row: dict[str, Any]) -> tuple[str, str]:
    """Return how many more bytes the tuned layer moves than eager and than the peer; nothing where not counted."""
    sides = row["dram"]["sides"] if row["dram"] else {}
    found = layer_cuda_dram.shares(layer_cuda_dram.totals_of(sides))
    eager, peer = (found.get(name) for name in (EAGER, row["best_peer"].removesuffix(CAPTURED)))
    return tuple("" if share is None else f"{-share:+.1%}" for share in (eager, peer))  # type: ignore[return-value]


def over_eager(row: dict[str, Any]) -> str:
    most = errors.over_eager(row["errors"])
    return "" if most is None else f"{most[1]:.2f}"


def mhz(clock: float | None) -> str:
    return "" if clock is None else f"{clock:.0f}"


def rates(facts: dict[str, float]) -> str:
    """Return the rates of ceilings at their largest amounts."""
    ceilings = Roofline.from_facts(facts)
    products = (f"{dtype} {last_rate(ladder) / 1e6:.0f} TFLOP/s" for dtype, ladder in sorted(ceilings.products.items()))
    return ", ".join([*products, f"bytes {last_rate(ceilings.moved) / 1e3:.0f} GB/s"])


def last_rate(ladder: Ladder) -> float:
    amount, us = ladder.rungs[-1]
    return amount / us


def layer(row: dict[str, Any]) -> str:
    """Return the sentence on what a case is."""
    options = ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in row["options"].items()
    )
    return f"{row['layer']} as {row['model']} in {row['dtype']}: {options}."


def extents(row: dict[str, Any]) -> str:
    sizes = ", ".join(f"{axis} {extent}" for axis, extent in row["extents"].items())
    chosen, unfused = (row["bytes_moved"][name] / 2**20 for name in ("chosen", "unfused"))
    return (
        f"Extents {sizes}. {row['contraction_flop'] / 1e9:.1f} GFLOP in contractions, {chosen:.0f} MiB moved "
        f"({unfused:.0f} unfused)."
    )


def ms(us: float) -> str:
    return f"{us / 1e3:.3f}"
