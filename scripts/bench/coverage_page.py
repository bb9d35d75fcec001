"""The page of scripts/coverage: a row for each architecture, and what ends regions, the heaviest first."""

from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

from scripts.bench.coverage_counts import SMALL
from scripts.pages import table
from scripts.sides import about

PACKAGES = ("torch", "transformers", "timm", "x-transformers", "diffusers", "torchvision", "einops")
OPTIONAL = ("timm", "x-transformers", "diffusers", "torchvision", "einops", "einx", "torch-einops-utils", "loguru",
            "frozendict", "pillow", "ftfy", "wcwidth", "importlib_metadata", "zipp")  # fmt: skip
"""What a plain install would bring along beside torch, which must stay as it is."""
GOAL, LEAST, AIM = 0.9, 0.6, 50
TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
TOLD = 3

SENTENCES = {
    "LeViT (timm)": "Batch norms stand behind its projections. They change running statistics, so they stay torch's.",
    "U-Net with cross-attention (diffusers)": "Most of its flop are convolutions, which have no kernel here.",
    "ViT in einops' style": "Dynamo breaks the graph at the model's loop, and leaves its `nn.Sequential` to Python.",
}
"""Reasons why less than `LEAST` is in regions."""


def facts() -> dict[str, Any]:
    """Return where, when, and with which versions the page is made."""
    found = about("coverage")
    del found["versions"]["numpy"], found["versions"]["scipy"]
    optional = {name: _version(name) for name in OPTIONAL}
    found["install"] = [f"{name}=={number}" for name, number in optional.items() if number]
    found["versions"] |= {name: number for name in PACKAGES if (number := _version(name))}
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def page(about: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the page in Markdown."""
    counted = [row for row in rows if row["status"] == "ok"]
    reached = sum(row["share"] >= GOAL for row in counted)
    below = sum(row["share"] < LEAST for row in counted)
    fused = [share for row in counted if (share := _fused(row)) is not None]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    of = "the classes of transformers" if "--classes" in about["command"] else "architectures"
    lines = [
        f"# Coverage of {of}",
        "",
        f"{versions}, {about['date']}, commit {about['commit']}. `{about['command']}`",
        "",
        f"{reached} of {len(rows)} architectures have at least {GOAL:.0%} of their repeated layers' flop in regions "
        f"(goal: {AIM}); {below} have less than {LEAST:.0%}; {len(rows) - len(counted)} were not counted. "
        f"All attention is one kernel forward and one backward in {sum(each == 1.0 for each in fused)} of {len(fused)} "
        "with regions that have any.",
        "",
        "Each architecture has the configuration that it has by default, but for sizes: 2 to 4 layers, 16 to 64 "
        "tokens, random weights. It is called in train mode on the CPU, in a process of its own; nothing is measured. "
        "Flop are of matrix products, convolutions and attention, as torch counts them. Regions are counted whose "
        "calls have a place in the model: no other part of it lies between theirs. *Layers* is the share of the "
        "flop of modules that repeat; *all* is that of the whole forward, where stems and heads weigh more than they "
        "do in full size. *Regions a layer* and *operators* are of the regions found. *Choice* is the share of "
        "the layers' flop in products that more than one candidate of the search space for CUDA could compute. "
        "*Fused* is the share of attentions for which a kernel for CUDA does all between the products, and another one "
        "all gradients, in the types and sizes of heads that these take. "
        "*Read* is the time from dynamo's graphs to regions; beside it stand dynamo's own tracing, and a first call "
        "with the backend `aot_eager`. *Error* compares a training step in float64 with eager: the largest difference "
        "of an output as a share of its norm, or of a gradient as a share of the largest gradient's norm. torch "
        "multiplies no experts in float64, so models with experts are compared in float32, as it says there.",
        "",
        *table(
            ("architecture", "of", "layers", "all", "regions a layer", "operators", "choice", "fused", "read, s",
             "dynamo, s", "aot_eager, s", "error"),
            (_cells(row) for row in rows),
        ),
        "",
        "## What ends regions",
        "",
        *(line for row in counted for line in _sentence(row)),
        "The heaviest parts of layers that are in no region, as shares of the layers' flop. `*` is a layer's number.",
        "",
        *table(("architecture", "share", "module", "why"), (cells for row in rows for cells in _reasons(row))),
        "",
        "## Reasons, of all architectures",
        "",
        *table(("architectures", "share, summed", "why"), _all_reasons(counted)),
    ]  # fmt: skip
    odd = [cells for row in counted for cells in _small(row)]
    if odd:
        heads = ("architecture", "runs", "operators")
        lines += ["", f"## Regions of {SMALL} operators or fewer", "", *table(heads, odd)]
    lines += ["", *_install(about)]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if row["status"] != "ok":
        return row["name"], row["family"], f"**{row['status']}**: {_plain(row['why'])}", *[""] * 9
    operators = [len(region["kinds"]) for region in row["regions"] for _ in range(region["runs"])]
    middle = f"{median(operators):.0f}" if operators else ""
    spread = middle if len(set(operators)) < 2 else f"{middle} ({min(operators)} to {max(operators)})"
    each = f"{len(operators) / row['layers']:.1f}" if row["layers"] else ""
    aot = f"{row['aot_s']:.1f}" if "aot_s" in row else ""
    fused = _fused(row)
    return (row["name"], row["family"], _share(row["share"]), _share(row["share_of_all"]), each, spread,
            _share(row["tuned_share"]), "" if fused is None else _share(fused), f"{row['read_s']:.1f}",
            f"{row['dynamo_s']:.1f}", aot, _error(row))  # fmt: skip


def _fused(row: dict[str, Any]) -> float | None:
    """Return the share of a model's attentions that are one kernel each; None where its regions have none."""
    known = [(each["runs"], each.get("attentions", 0), each.get("fused_attentions", 0)) for each in row["regions"]]
    total = sum(runs * count for runs, count, _ in known)
    return sum(runs * fused for runs, _, fused in known) / total if total else None


def _error(row: dict[str, Any]) -> str:
    said = _plain(row.get("check", ""))
    if "error" not in row:
        return said
    error, dtype = f"{row['error']:.0e}", row.get("checked_in", "float64")
    found = f"**{error}**" if row["error"] > TOLERANCES[dtype] else error
    found += "" if dtype == "float64" else f" ({dtype})"
    return f"{found}; {said}" if said else found


def _reasons(row: dict[str, Any]) -> list[tuple[str, ...]]:
    if row["status"] != "ok" or row["share"] >= GOAL:
        return []
    heavy = [each for each in row["reasons"] if each["share"] > 0] or row["reasons"]
    told = [(_share(each["share"]), each["module"] or "the model itself", _plain(each["reason"])) for each in heavy]
    if not told and row["why_not"]:
        told = [("", "", _plain(row["why_not"]))]
    return [(row["name"] if place == 0 else "", *cells) for place, cells in enumerate(told[:TOLD])]


def _sentence(row: dict[str, Any]) -> list[str]:
    if row["share"] >= LEAST:
        return []
    return [f"- **{row['name']}**, {_share(row['share'])}: {SENTENCES.get(row['name'], 'not looked into.')}", ""]


def _all_reasons(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    shares: dict[str, dict[str, float]] = {}
    for row in rows:
        for each in row["reasons"]:
            of = shares.setdefault(_plain(each["reason"]), {})
            of[row["name"]] = of.get(row["name"], 0.0) + each["share"]
    heavy = {why: of for why, of in shares.items() if sum(of.values()) > 0.005}
    order = sorted(heavy, key=lambda why: -sum(heavy[why].values()))
    return [(str(len(heavy[why])), f"{sum(heavy[why].values()):.2f}", why) for why in order[:30]]


def _small(row: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (row["name"], str(region["runs"]), ", ".join(region["kinds"]))
        for region in row["regions"] if len(region["kinds"]) <= SMALL
    ]  # fmt: skip


def _install(about: dict[str, Any]) -> list[str]:
    pins = " ".join(about["install"])
    return [
        "Libraries beside transformers are installed without what they ask for, so that torch stays what it is: "
        f"`pip install --no-deps --target libraries {pins}`, and then `PYTHONPATH=libraries scripts/coverage --check`.",
        "",
        "Where torchvision's own library cannot be loaded with the torch that is there, the shapes of two of its "
        "operators are declared instead; no architecture here calls them.",
    ]


def _share(share: float) -> str:
    return f"{share:.0%}"


def _plain(text: str) -> str:
    """Return a text that fits into a cell."""
    return " ".join(text.replace("|", "/").split())[:240]
