"""The encoder layer on CUDA: one case of the benchmark, and the page of results."""

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from autotuner.ir.cost import moved_bytes, operator_flop, reduction
from autotuner.measure.roofline import Ladder, Roofline
from autotuner.plan.configuration import Configuration, save_configuration
from autotuner.plan.step import tensor_of
from autotuner.runtime.peers.on_cuda import CAPTURED, OURS
from scripts.bench import layer_cuda_dram
from scripts.bench.all_peers import SideTiming, time_all_peers
from scripts.pages import mib, table, title

FLOORS = {"floor": "floor_us", "of products": "compute_floor_us", "of bytes": "bytes_floor_us"}


def case(
    preset: str,
    dtype: str,
    dropout: float,
    found: Configuration,
    samples: int,
    *,
    max_autotune: bool = True,
    profiler: bool = True,
) -> dict[str, Any]:
    """Time a configuration and all its peers, then count their bytes; return one row of results.

    Peers that compute less than the model asks for are timed, and no ratio is formed with them.
    """
    timings, measured = time_all_peers(found, samples, max_autotune=max_autotune)
    peer = min(measured.peers_us, key=measured.peers_us.__getitem__)
    dram = counted(found, timings) if profiler else None
    graph = found.graph()
    flop = sum(operator_flop(graph, operator) for operator in graph.operators if operator.kind == "contraction")
    named = {operator.name: operator for operator in graph.operators}
    steps = []
    for number, step in enumerate(found.steps):
        step_flop = sum(operator_flop(graph, named[n]) for n in step.operators if named[n].kind == "contraction")
        step_bytes = moved_bytes(graph, [[(tensor_of(name), form) for name, form in step.inputs + step.outputs]])
        steps.append(
            {
                "operators": list(step.operators) or ["conversion"],
                "kernel": step.kernel,
                "phase": step.phase,
                "predicted_us": step.predicted_us,
                "bound_us": step.bound_us,
                "flop": step_flop,
                "counted_bytes": step_bytes,
                "dram_bytes": dram["steps"].get(number) if dram else None,
            }
        )
    return {
        "preset": preset,
        "dtype": dtype,
        "dropout": dropout,
        "extents": dict(found.model.extents),
        "timings": {name: asdict(timing) for name, timing in timings.items()},
        "tuned_us": measured.plan_us,
        "best_peer": peer,
        "ratio_to_best_peer": measured.ratios[peer],
        "predicted_us": found.certificate.predicted_us,
        "overhead_us": measured.overhead_us,
        "predicted_over_measured": measured.predicted_over_measured(found.certificate.predicted_us),
        "lower_bound_us": found.certificate.lower_bound_us,
        "default_us": found.certificate.default_us,
        "contraction_flop": flop,
        "bytes_moved": dict(found.bytes_moved),
        "bytes_reduction_percent": reduction(found.bytes_moved["unfused"], found.bytes_moved["chosen"]),
        "planned_peak_bytes": found.memory.peak_bytes if found.memory else None,
        "held_bytes": found.memory.held_bytes if found.memory else None,
        "calls": dict(found.counts),
        "steps": steps,
        "dram": dram and {name: dram[name] for name in ("sides", "reason")},
    }


def counted(found: Configuration, timings: dict[str, SideTiming]) -> dict[str, Any]:
    """Return what the profiler counts for a configuration, the framework's layer and the fastest compiled peer."""
    by_us = sorted((timing.median_us, name.removesuffix(CAPTURED)) for name, timing in timings.items())
    compiled = next((name for _, name in by_us if name.startswith("torch.compile")), None)
    with TemporaryDirectory() as folder:
        file = Path(folder, "configuration.json")
        save_configuration(found, file)
        return layer_cuda_dram.counted(file, compiled)


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
    cases = sorted(cases, key=title)
    lines = [
        "# The encoder layer on a GPU",
        "",
        f"{about['device_name']} ({about['multiprocessors']} multiprocessors), driver {about['driver']}, CUDA "
        f"{about['cuda']}, cuDNN {about['cudnn']}, torch {about['torch']}, triton {about['triton']}.",
        "",
        "One training step (forward, backward, all gradients), milliseconds, all sides interleaved in one run; all "
        "drop their gradients before each step. Captured: the whole step as one CUDA graph. Ratio: the fastest peer "
        "over the fastest form of the tuned layer; above 1, the tuned layer is faster. Sides of JAX's are timed by the "
        "host's clock, from idle to idle; their peak is XLA's plan of results and temporaries.",
        "",
        *table(
            ("case", "tuned", "fastest peer", "", "ratio", "predicted", *FLOORS, "bytes moved"),
            (
                (
                    title(row),
                    ms(row["tuned_us"]),
                    ms(row["timings"][row["best_peer"]]["median_us"]),
                    row["best_peer"],
                    f"**{row['ratio_to_best_peer']:.2f}**",
                    f"{row['predicted_over_measured']:+.1%}",
                    *(ms(row[name]) for name in FLOORS.values()),
                    f"{-row['bytes_reduction_percent']:+.1f} %",
                )
                for row in cases
            ),
        ),
        "",
        "Predicted: the sum of the plan's own kernel timings and the overhead, against what was measured. Where load "
        "that lasts brings the device to its power limit, its clock falls, and steps take longer than kernels that "
        "were timed in short rounds: see SM clock, the median of a side's turns, where it was read. Bytes moved: "
        "against every operator alone.",
        "",
        "Floor: what the plan's steps take at least, each for its products or for the bytes that it reads and writes, "
        "whichever is more; the sums of either alone beside it. They follow from the device's ceilings, which were "
        f"measured as kernels are ({about['ceilings_run']['date']}, commit {about['ceilings_run']['commit']}; at the "
        f"largest amounts: {rates(about['ceilings'])}), lowered where a step took less.",
    ]
    for row in cases:
        ran = row["run"]
        lines += ["", f"## {title(row)}", "", f"{ran['date']}, commit {ran['commit']}. `{ran['command']}`", ""]
        lines += [extents(row), ""]
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
        if not any(name.startswith("max-autotune") for name in row["timings"]):
            lines += ["", "torch.compile's max-autotune is not among the sides."]
        less = [name for name, timing in row["timings"].items() if timing["computes_less"]]
        if less:
            lines += ["", f"No peer, because it computes less than the model asks for: {'; '.join(less)}."]
        lines += ["", *dram(row)]
        lines += ["", "Steps of the plan, microseconds. Best: the fastest measured for the same work in any forms.", ""]
        lines += table(
            ("step", "kernel", "predicted", "best", *FLOORS, "counted, MiB", "DRAM, MiB"),
            (
                (
                    " + ".join(step["operators"]),
                    step["kernel"],
                    *(f"{step[name]:.1f}" for name in ("predicted_us", "bound_us", *FLOORS.values())),
                    *(mib(step[k]) for k in ("counted_bytes", "dram_bytes")),
                )
                for step in row["steps"]
            ),
        )
    return "\n".join(lines) + "\n"


def dram(row: dict[str, Any]) -> list[str]:
    """Return the lines on what went through DRAM, or on why nobody counted it."""
    found = row["dram"]
    if found is None:
        return ["Bytes through DRAM were not counted: `--without-profiler`."]
    missing = [] if found["reason"] is None else [f"Not all bytes through DRAM were counted: {found['reason']}."]
    sides = {name: (bytes_["read_bytes"], bytes_["written_bytes"]) for name, bytes_ in found["sides"].items()}
    if not sides:
        return missing
    lines = [
        "Bytes through DRAM per training step, MiB, as Nsight Compute counts them, kernel by kernel, in "
        f"{layer_cuda_dram.STEPS} steps without CUDA graphs; copies and fills by the driver are left out.",
        "",
    ]
    lines += table(
        ("side", "read", "written", "together"),
        ((name, mib(read), mib(written), mib(read + written)) for name, (read, written) in sides.items()),
    )
    if layer_cuda_dram.TUNED in sides:
        moved, through = row["bytes_moved"]["chosen"], sum(sides[layer_cuda_dram.TUNED])
        share = 1 - through / moved
        lines += ["", f"The tuned layer's kernels read and write {mib(moved)} MiB, counted by their operands, and "
                  f"{mib(through)} MiB go through DRAM: {abs(share):.0%} {'less' if share > 0 else 'more'}. What the "
                  "second-level cache keeps need not go there; a kernel's own workspace is no operand; and what a step "
                  "leaves in the cache is written during a later one, so single steps may move more."]  # fmt: skip
    return [*lines, "", *missing] if missing else lines


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


def extents(row: dict[str, Any]) -> str:
    sizes = ", ".join(f"{axis} {extent}" for axis, extent in row["extents"].items())
    chosen, unfused = (row["bytes_moved"][name] / 2**20 for name in ("chosen", "unfused"))
    return (
        f"Extents {sizes}. {row['contraction_flop'] / 1e9:.1f} GFLOP in contractions, {chosen:.0f} MiB moved "
        f"({unfused:.0f} unfused)."
    )


def ms(us: float) -> str:
    return f"{us / 1e3:.3f}"
