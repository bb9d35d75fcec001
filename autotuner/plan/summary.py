"""The numbers that a configuration states about itself: totals, fused sets, counts, and where it comes from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autotuner.ir.cost import reduction
from autotuner.ir.numerics import CLASSES
from autotuner.ir.records import STATUSES
from autotuner.plan.configuration import Configuration
from autotuner.plan.explanation import PlanExplanation
from autotuner.plan.parts import Certificate, Fusion, Measured
from autotuner.plan.phrases import (
    BUSY,
    KERNELS_OF_A_STEP,
    MISSING,
    NEVER_MEASURED,
    ON_A_BUSY_DEVICE,
    TIMES,
    binary,
    counted,
    duration,
    interval_us,
    moment,
    percent,
    ratio,
    span,
    statistics_words,
    times_default,
    us,
)

DEFAULT = "default"
DOUBTFUL = "times that are doubtful"
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Total:
    """A time of the whole training step. `against` is it over the plan's; None for the plan itself and for parts."""

    name: str
    us: float
    against: float | None
    words: str
    is_plan: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """A number to see first."""

    name: str
    value: str
    words: str


@dataclass(frozen=True, slots=True)
class Count:
    """A count: when it was tuned, and in the database now; None where that is not recorded."""

    name: str
    tuned: int | None
    now: int | None
    words: str
    is_part: bool = False


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a training step needs; `against` is it over the plan's, None for the plan and where not known."""

    name: str
    count: int | None
    against: float | None
    words: str
    is_plan: bool = False


def lead(configuration: Configuration) -> str:
    """Return the result in one sentence, and why it is doubtful, where it is."""
    doubts = " ".join(doubt.sentence for doubt in configuration.doubts)
    return _result(configuration) + (f" This is doubtful. {doubts}" if doubts else "")


def _result(configuration: Configuration) -> str:
    model, device = configuration.model, configuration.environment.get("device_name", "a device without a name")
    what = f"One training step of {model.reference} in {model.dtype}"
    measured = configuration.measured
    if measured is None:
        kernels = duration(configuration.certificate.predicted_us)
        return f"{what} is predicted to spend {kernels} in its kernels on {device}; it has not been timed end to end."
    text = f"{what} takes {duration(measured.plan_us)} on {device}, measured end to end"
    peer = _best_peer(measured)
    if peer is None:
        return f"{text}."
    others = {1: "its peer", 2: "the faster of its peers"}.get(len(measured.peers_us), "the fastest of its peers")
    return f"{text}: {ratio(measured.ratios[peer])} as fast as {peer}, {others}."


def figures(configuration: Configuration) -> Iterator[Figure]:
    """Yield the numbers to see first."""
    certificate, measured = configuration.certificate, configuration.measured
    if measured is not None:
        yield Figure("measured end to end", duration(measured.plan_us), f"median of {measured.samples} training steps")
        off = measured.predicted_over_measured(configuration.kernels_us)
        words = f"kernels and what lies beside them, {percent(off, signed=True)} from measured"
        yield Figure("predicted", duration(measured.predicted_us(configuration.kernels_us)), words)
        peer = _best_peer(measured)
        if peer is not None:
            yield Figure(
                "against the best peer",
                ratio(measured.ratios[peer]),
                f"{peer}; above 1{TIMES} means faster than it",
            )
    else:
        within = span(certificate.low_us, certificate.high_us)
        words = f"sum of its kernels' times, {within} within their 95 % intervals; not timed end to end"
        yield Figure("predicted", duration(certificate.predicted_us), words)
    medians = DOUBTFUL if configuration.doubts else "medians"
    bound = f"no plan takes less than {duration(certificate.lower_bound_us)}, by {medians}"
    if certificate.proven_gap is None:
        bound = f"not known: {NEVER_MEASURED}"
    yield Figure("proven gap", percent(certificate.proven_gap), bound)
    if certificate.estimated_gap is not None:
        yield Figure("estimated gap", percent(certificate.estimated_gap), "by learned costs: not proven")
    if certificate.default_us is not None and certificate.predicted_us:
        words = f"every operator alone, as declared: {duration(certificate.default_us)}"
        if certificate.default_is_marked:
            words += f"; {ON_A_BUSY_DEVICE}"
        yield Figure("against the default", ratio(_times_default(certificate)), words)
    more = _more_moved(configuration)
    if more is not None:
        chosen, unfused = (binary(configuration.bytes_moved[name]) for name in ("chosen", "unfused"))
        yield Figure("bytes moved", percent(more, signed=True), f"{chosen} against {unfused} unfused")


def totals(configuration: Configuration) -> Iterator[tuple[str, str]]:
    """Yield all totals with their names, as a table of two columns: times in microseconds, in ASCII."""
    certificate = configuration.certificate
    yield KERNELS_OF_A_STEP, us(certificate.predicted_us)
    yield "if their 95 % intervals hold", interval_us(certificate.low_us, certificate.high_us)
    yield "lower bound, proven", f"{us(certificate.lower_bound_us)} ({_above_bound(configuration)})"
    if certificate.estimated_gap is not None:
        yield "gap by learned costs, estimated", f"{certificate.estimated_gap:.2%}"
    busy = f" ({BUSY})" if certificate.default_is_marked else ""
    yield "the paper's shortest path", _us_or_none(certificate.baseline_us)
    yield "every operator alone, as declared", _us_or_none(certificate.default_us) + busy
    conversions_us = [step.predicted_us for step in configuration.steps if step.is_conversion]
    yield "conversions", f"{len(conversions_us)}, {us(sum(conversions_us))}"
    more = _more_moved(configuration)
    yield "bytes moved against unfused", "not known" if more is None else f"{100 * more:+.1f} %"
    for need in needs(configuration):
        yield f"memory: {need.name}", "not known" if need.count is None else binary(need.count)
    count = {row.name: f"{row.tuned or 0:,}" for row in count_rows(configuration, None)}
    if "cells sampled" in count:
        combinations = f"{configuration.counts.get('sampled_combinations', 0):,}"
        cells = f"{count['cells enumerated']} enumerated, {count['cells sampled']} sampled"
        yield "cells (kernel and forms)", f"{cells}: {count['tried']} of {combinations} tried, the rest unknown"
    yield "calls measured / reused / failed", " / ".join(count[name] for name in ("measured", "reused", "failed"))
    noise = certificate.noise_floor
    yield "noise floor of this device", "not measured" if noise is None else f"{noise:.1%}"
    if certificate.statistics:
        yield "solving took", statistics_words(certificate.statistics)


def _above_bound(configuration: Configuration) -> str:
    gap = configuration.certificate.proven_gap
    if gap is None:
        return NEVER_MEASURED
    above = f"the plan is {gap:.2%} above" if gap else "no plan takes less"
    return f"{above}, by {DOUBTFUL}" if configuration.doubts else above


def _more_moved(configuration: Configuration) -> float | None:
    """Return by which share the plan moves more bytes than unfused, below 0 for fewer; None where that is not known."""
    unfused, chosen = configuration.bytes_moved["unfused"], configuration.bytes_moved["chosen"]
    return -reduction(unfused, chosen) / 100 if unfused else None


def _us_or_none(value: float | None) -> str:
    return "no plan" if value is None else us(value)


def measured_totals(measured: Measured, kernels_us: float) -> Iterator[Total]:
    """Yield what was measured end to end: this plan, what of it lies beside its kernels, and its peers."""
    yield Total("this configuration", measured.plan_us, None, "forward, backward and all gradients", is_plan=True)
    predicted_us = measured.predicted_us(kernels_us)
    off = percent(measured.predicted_over_measured(kernels_us), signed=True)
    yield Total(
        "kernels and the rest, predicted",
        predicted_us,
        predicted_us / measured.plan_us,
        f"{off} from what was measured",
    )
    yield Total(
        "of it, beside the kernels", measured.overhead_us, None,
        "the same step with its kernels left out: copies of inputs and parameters, autograd, Python",
    )  # fmt: skip
    for name, peer_us in measured.peers_us.items():
        against = peer_us / measured.plan_us
        words = "this configuration is faster" if against > 1 else "this configuration is not faster"
        yield Total(name, peer_us, against, words)


def kernel_totals(configuration: Configuration) -> Iterator[Total]:
    """Yield the sums of kernel times: this plan's, its lower bound, and what other strategies reach."""
    certificate = configuration.certificate
    plan_us = certificate.predicted_us
    within = span(certificate.low_us, certificate.high_us)
    words = f"each chosen kernel's median, conversions included; {within} within their 95 % intervals"
    yield Total("this configuration", plan_us, None, words, is_plan=True)
    others = (
        (
            "lower bound",
            certificate.lower_bound_us,
            "proven: no plan takes less; what was not measured counts as little as it possibly could",
        ),
        (
            "the paper's shortest path",
            certificate.baseline_us,
            "the strategy of Ivanov et al. (MLSys 2021), same times",
        ),
        (
            DEFAULT,
            certificate.default_us,
            "every operator alone, with every tensor as declared"
            + (f"; {ON_A_BUSY_DEVICE}" if certificate.default_is_marked else ""),
        ),
    )
    for name, other_us, words in others:
        if other_us is not None:
            against = other_us / plan_us if plan_us else None
            yield Total(name, other_us, _times_default(certificate) if name == DEFAULT else against, words)


def _times_default(certificate: Certificate) -> float | None:
    return times_default(certificate.default_us, certificate.predicted_us, is_marked=certificate.default_is_marked)


def needs(configuration: Configuration) -> Iterator[Need]:
    """Yield what a training step needs of memory: the budget, what was planned, what was measured, and its peers."""
    memory, measured = configuration.memory, configuration.measured
    plan_bytes = measured.peak_bytes if measured is not None else None
    peak = "the most at any time, beside parameters and inputs"
    if memory is not None:
        if memory.budget_bytes is not None:
            yield Need("budget", memory.budget_bytes, None, "what was asked for")
        inexact = "".join(
            f"; {CLASSES[numerics].held.format(counted(len(tensors), 'activation'))}"
            for numerics, tensors in configuration.inexact.items() if CLASSES[numerics].for_memory
        )  # fmt: skip
        yield Need("held for backward", memory.held_bytes, None, f"what forward leaves, as planned{inexact}")
        words = f"{peak}, with the kernels' workspaces"
        if plan_bytes:
            words += f"; {percent(memory.peak_bytes / plan_bytes - 1, signed=True)} from measured"
        yield Need("peak, as planned", memory.peak_bytes, None, words, is_plan=plan_bytes is None)
    if plan_bytes is not None and measured is not None:
        yield Need("peak, measured", plan_bytes, None, peak, is_plan=True)
        for name, count in measured.peers_peak_bytes.items():
            against = count / plan_bytes if count is not None and plan_bytes else None
            yield Need(name, count, against, "not known" if count is None else peak)


def remarks(configuration: Configuration, explained: PlanExplanation) -> Iterator[str]:
    """Yield why the plan is not faster, a sentence for each total that is not there, and one about the noise floor."""
    certificate = configuration.certificate
    yield from explained.reasons
    if certificate.baseline_us is None:
        yield "The paper's shortest path found no plan over these measurements."
    if certificate.default_us is None:
        yield "The default is not known: not every operator has a time alone with its tensors as declared."
    if certificate.noise_floor is None:
        yield "The noise floor was not measured."
    else:
        yield (
            f"Two identical calls differed by {percent(certificate.noise_floor)} in this environment: "
            "smaller differences mean nothing."
        )


def fused_sets(configuration: Configuration) -> tuple[Fusion, ...]:
    """Return the chosen sets of operators, then the others: those first that promised most on their own."""

    def promise(fusion: Fusion) -> tuple[bool, bool, float]:
        gain = fusion.best_us - fusion.instead_us if fusion.best_us is not None else 0.0
        return not fusion.chosen, fusion.best_us is None, gain

    return tuple(sorted(configuration.fusions, key=promise))


def count_rows(configuration: Configuration, now: Mapping[str, int] | None) -> Iterator[Count]:
    """Yield the counts of the tuning, and of the database `now` (by status, and unknown) where they are given."""
    tuned = configuration.counts
    failing = [status for status in STATUSES if status != "ok"]

    def today(*names: str) -> int | None:
        return sum(now.get(name, 0) for name in names) if now is not None else None

    yield Count("choices", tuned.get("choices"), None, "ways to compute a set of operators, and to convert a tensor")
    words = "different calls among them; equal work is measured once"
    yield Count("calls", tuned.get("calls"), today(*STATUSES, "unknown"), words)
    yield Count("measured", tuned.get("measured"), None, "timed, or found to fail, in this tuning")
    yield Count("reused", tuned.get("reused"), None, "known from an earlier tuning")
    yield Count("with a time", tuned.get("status_ok"), today("ok"), "what the solver could choose from")
    yield Count("failed", tuned.get("failed"), today(*failing), "left out, each with the reason stored with it")
    for status in failing:
        name, own, current = status.replace("_", " "), tuned.get(f"status_{status}"), today(status)
        if own or current:
            yield Count(name, own, current, "", is_part=True)
    yield Count("unknown", tuned.get("unknown"), today("unknown"), "never measured: neither best nor worst")
    if tuned.get("cells_sampled"):
        yield Count("cells enumerated", tuned.get("cells_enumerated"), None, "kernel and forms: every parameter tried")
        yield Count("cells sampled", tuned["cells_sampled"], None, "with more combinations than are all tried")
        untried = tuned.get("sampled_combinations", 0) - tuned.get("sampled_tried", 0)
        yield Count("tried", tuned.get("sampled_tried"), None, "combinations of the sampled cells", is_part=True)
        yield Count("untried", untried, None, "the others: unknown, neither best nor worst", is_part=True)


def model_facts(configuration: Configuration) -> Pairs:
    model = configuration.model
    axes = model.definition.get("axes", {})
    return (
        ("model", model.name),
        ("preset", model.preset or MISSING),
        ("element type", model.dtype),
        *((f"extent {axis} ({axes.get(axis, 'axis')})", f"{extent:,}") for axis, extent in model.extents.items()),
        *((f"option {name}", str(value)) for name, value in model.options.items()),
    )


def environment_facts(configuration: Configuration) -> Pairs:
    environment = configuration.environment
    grouped = [("", environment.get("facts", {})), ("policy: ", environment.get("policy", {}))]
    return (
        ("device", str(environment.get("device_name", MISSING))),
        ("device type", str(environment.get("device_type", MISSING))),
        *(
            (group + name.removesuffix("_bytes").replace("_", " "), _fact(name, value))
            for group, facts in grouped
            if isinstance(facts, Mapping)
            for name, value in facts.items()
        ),
        ("environment key", configuration.environment_key),
    )


def provenance(configuration: Configuration) -> Pairs:
    return (
        ("made", moment(configuration.created_at)),
        ("solver", configuration.certificate.solver),
        *((f"version of {name}", version) for name, version in configuration.versions.items()),
        ("schema", str(configuration.schema)),
        ("configuration key", configuration.key),
        ("graph key", configuration.graph_key),
    )


def _fact(name: str, value: object) -> str:
    return binary(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)


def _best_peer(measured: Measured) -> str | None:
    return min(measured.peers_us, key=lambda name: measured.peers_us[name], default=None)
