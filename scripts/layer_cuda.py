"""The encoder layer on CUDA: one case of the benchmark, the device's floors for it, and the page of results."""

from collections.abc import Iterable
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from autotuner.analysis import moved_bytes, operator_flop, reduction
from autotuner.configuration import Configuration, tensor_of
from autotuner.runtime.peers import as_measured, overhead_us, time_on_cuda
from autotuner.runtime.peers.on_cuda import OURS

PRODUCT_EXTENT = 8192
COPIED_BYTES = 1 << 30
REPEATS = 10


def timed_us(run: Any) -> float:
    """Return the median of a few runs between events, in microseconds, after three untimed ones."""
    found = []
    for number in range(REPEATS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if number >= 3:
            found.append(start.elapsed_time(end) * 1e3)
    return float(median(found))


def product_tflop_per_s(dtype: str) -> float:
    """Return the rate of the library's product of two large square matrices of random numbers."""
    shape = (PRODUCT_EXTENT, PRODUCT_EXTENT)
    a, b = (torch.randn(shape, device="cuda").to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * PRODUCT_EXTENT**3 / timed_us(lambda: torch.mm(a, b, out=out)) / 1e6


def copy_gb_per_s() -> float:
    """Return the rate of a plain copy that is much larger than the caches, read and written bytes together."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / timed_us(lambda: target.copy_(source)) / 1e3


def case(
    preset: str, dtype: str, dropout: float, found: Configuration, samples: int, *, max_autotune: bool = True
) -> dict[str, Any]:
    """Time a configuration and all its peers; return one row of results."""
    timings = time_on_cuda(found, samples, all_peers=True, max_autotune=max_autotune)
    overhead = overhead_us(found, samples)
    measured = as_measured(timings, samples, overhead)
    peer = min(measured.peers_us, key=measured.peers_us.__getitem__)
    tflop, copies = product_tflop_per_s(dtype), copy_gb_per_s()
    graph = found.graph()
    flop = sum(operator_flop(graph, operator) for operator in graph.operators if operator.kind == "contraction")
    named = {operator.name: operator for operator in graph.operators}
    steps = []
    for step in found.steps:
        step_flop = sum(operator_flop(graph, named[n]) for n in step.operators if named[n].kind == "contraction")
        step_bytes = moved_bytes(graph, [[(tensor_of(name), form) for name, form in step.inputs + step.outputs]])
        steps.append(
            {
                "operators": list(step.operators) or ["conversion"],
                "kernel": step.kernel,
                "phase": step.phase,
                "predicted_us": step.predicted_us,
                "bound_us": step.bound_us,
                "compute_floor_us": step_flop / tflop / 1e6,
                "dram_floor_us": step_bytes / copies / 1e3,
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
        "overhead_us": overhead,
        "predicted_over_measured": measured.predicted_over_measured(found.certificate.predicted_us),
        "lower_bound_us": found.certificate.lower_bound_us,
        "default_us": found.certificate.default_us,
        "product_tflop_per_s": tflop,
        "copy_gb_per_s": copies,
        "contraction_flop": flop,
        "compute_floor_us": flop / tflop / 1e6,
        "dram_floor_us": found.bytes_moved["chosen"] / copies / 1e3,
        "bytes_moved": dict(found.bytes_moved),
        "bytes_reduction_percent": reduction(found.bytes_moved["unfused"], found.bytes_moved["chosen"]),
        "planned_peak_bytes": found.memory.peak_bytes if found.memory else None,
        "held_bytes": found.memory.held_bytes if found.memory else None,
        "calls": dict(found.counts),
        "steps": steps,
    }


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
    lines = [
        "# The encoder layer on a GPU",
        "",
        f"{about['device_name']} ({about['multiprocessors']} multiprocessors), driver {about['driver']}, CUDA "
        f"{about['cuda']}, cuDNN {about['cudnn']}, torch {about['torch']}, triton {about['triton']}, {about['date']}, "
        f"commit {about['commit']}. `{about['command']}`",
        "",
        "One training step (forward, backward, all gradients), milliseconds, all sides interleaved in one run; all "
        "drop their gradients before each step. Captured: the whole step as one CUDA graph. Ratio: the fastest peer "
        "over the fastest form of the tuned layer; above 1, the tuned layer is faster.",
        "",
        *table(
            ("case", "tuned", "fastest peer", "", "ratio", "predicted", "compute floor", "DRAM floor", "bytes moved"),
            (
                (
                    title(row),
                    ms(row["tuned_us"]),
                    ms(row["timings"][row["best_peer"]]["median_us"]),
                    row["best_peer"],
                    f"**{row['ratio_to_best_peer']:.2f}**",
                    f"{row['predicted_over_measured']:+.1%}",
                    ms(row["compute_floor_us"]),
                    ms(row["dram_floor_us"]),
                    f"{-row['bytes_reduction_percent']:+.1f} %",
                )
                for row in cases
            ),
        ),
        "",
        "Predicted: the sum of the plan's own kernel timings and the overhead, against what was measured. Compute "
        "floor: the flop of the contractions at the rate of the library's product of two 8192 x 8192 matrices. DRAM "
        "floor: the bytes that the chosen steps read and write, counted, at the rate of a copy of 1 GiB; what stays "
        "in the second-level cache is faster. Bytes moved: against every operator alone.",
    ]
    for row in cases:
        lines += ["", f"## {title(row)}", "", extents(row), ""]
        best = row["tuned_us"]
        lines += table(
            ("side", "median", "least", "over tuned", "peak, MiB"),
            (
                (
                    f"tuned: {name}" if name in OURS else name,
                    f"{timing['median_us'] / 1e3:.4f}",
                    f"{timing['least_us'] / 1e3:.4f}",
                    f"{timing['median_us'] / best:.2f}",
                    "" if timing["peak_bytes"] is None else f"{timing['peak_bytes'] / 2**20:.1f}",
                )
                for name, timing in sorted(row["timings"].items(), key=lambda item: item[1]["median_us"])
            ),
        )
        lines += ["", "Steps of the plan, microseconds. Best: the fastest measured for the same work in any forms.", ""]
        lines += table(
            ("step", "kernel", "predicted", "best", "compute floor", "DRAM floor"),
            (
                (
                    " + ".join(step["operators"]),
                    step["kernel"],
                    *(f"{step[k]:.1f}" for k in ("predicted_us", "bound_us", "compute_floor_us", "dram_floor_us")),
                )
                for step in row["steps"]
            ),
        )
    return "\n".join(lines) + "\n"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    names = list(heads)
    return [
        f"| {' | '.join(names)} |",
        "| --- " * len(names) + "|",
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]


def extents(row: dict[str, Any]) -> str:
    sizes = ", ".join(f"{axis} {extent}" for axis, extent in row["extents"].items())
    chosen, unfused = (row["bytes_moved"][name] / 2**20 for name in ("chosen", "unfused"))
    return (
        f"Extents {sizes}. Products {row['product_tflop_per_s']:.0f} TFLOP/s, copies {row['copy_gb_per_s']:.0f} GB/s; "
        f"{row['contraction_flop'] / 1e9:.1f} GFLOP in contractions, {chosen:.0f} MiB moved ({unfused:.0f} unfused)."
    )


def title(row: dict[str, Any]) -> str:
    return f"{row['preset']} {row['dtype']} dropout {row['dropout']:g}"


def ms(us: float) -> str:
    return f"{us / 1e3:.3f}"
