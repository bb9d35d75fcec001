"""The page: one HTML file that needs nothing else, neither network nor script."""

from collections.abc import Mapping, Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from autotuner.plan import phrases, summary
from autotuner.plan.configuration import Configuration
from autotuner.plan.explanation import explain_plan
from autotuner.plan.report import shares, steps
from autotuner.plan.report.compare import StepComparison
from autotuner.plan.report.diagram import Diagram, Made, diagram
from autotuner.plan.report.drawing import POINT, draw


def render(
    configuration: Configuration,
    rows: Sequence[StepComparison] | None = None,
    *,
    counts: Mapping[str, int] | None = None,
) -> str:
    """Return a configuration as an HTML page.

    Args:
        configuration: what to show.
        rows: what was measured for each step's work, as `compare` returns it; None where no measurements are at hand,
            which the page then says.
        counts: calls in the database now by status, and `unknown`, as `tally` returns it; shown beside those of the
            tuning.

    Raises:
        ConfigurationError: the rows are of another configuration, or a step names what its graph lacks.
    """
    graph = steps.check_tensors(configuration)
    explained = explain_plan(configuration)
    content = diagram(configuration)
    drawing = draw(content)
    nothing_measured = rows is not None and not any(row.measured for row in rows)
    views = steps.step_views(configuration, content.boxes, None if nothing_measured else rows)
    certificate, measured = configuration.certificate, configuration.measured
    tensors = {made: number for number, made in enumerate(dict.fromkeys(line.made for line in drawing.lines))}
    return _environment().get_template("report.html").render(
        certificate=certificate,
        classes=shares.by_class(configuration),
        class_of_kind={member.kind: member.operator_class for box in content.boxes for member in box.members},
        configuration=configuration,
        conversions=sum(view.step.is_conversion for view in views),
        counts=tuple(summary.count_rows(configuration, counts)),
        counts_now=counts is not None,
        drawing=drawing,
        environment_facts=summary.environment_facts(configuration),
        figures=tuple(summary.figures(configuration)),
        excess_us=steps.excess_us(views),
        fused_sets=summary.fused_sets(configuration),
        graph=graph,
        is_declared={made: steps.is_declared(made, graph) for made in _named(content)},
        kernel_totals=tuple(summary.kernel_totals(configuration)),
        kernels=shares.by_kernel(configuration),
        kinds=shares.by_kind(configuration),
        lead=summary.lead(configuration),
        measured_totals=tuple(summary.measured_totals(measured, configuration.kernels_us)) if measured else (),
        model_facts=summary.model_facts(configuration),
        needs=tuple(summary.needs(configuration)),
        nothing_measured=nothing_measured,
        others_known=any(view.other is not None for view in views),
        overtaking=explained.overtaking,
        overtaking_count=explained.overtaking_count,
        point=POINT,
        provenance=summary.provenance(configuration),
        remarks=tuple(summary.remarks(configuration, explained)),
        rows_given=rows is not None and not nothing_measured,
        scale=steps.Scale.over(view.times for view in views),
        tensors=tensors,
        tensor_words={made: steps.tensor_words(made, graph, views) for made in tensors},
        total_us=sum(view.step.predicted_us for view in views),
        views=views,
    )  # fmt: skip


def _named(content: Diagram) -> set[Made]:
    """Return every tensor and form that the drawing names."""
    ports = {(port.tensor, port.form) for box in content.boxes for port in box.reads + box.makes}
    return ports | {flow.made for flow in content.flows}


@cache
def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("autotuner.plan.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    found.filters |= {
        "binary": phrases.binary, "candidate": steps.candidate_words, "duration": phrases.duration,
        "box_words": steps.box_words, "change": phrases.change, "failed": steps.failed_words,
        "failures": steps.failure_words, "form": phrases.short_form, "interval": steps.interval_words,
        "moment": phrases.moment, "other": steps.other_words, "percent": phrases.percent,
        "range_words": steps.range_words, "ratio": phrases.ratio, "us": phrases.microseconds,
    }  # fmt: skip
    return found
