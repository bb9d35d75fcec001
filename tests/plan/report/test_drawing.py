"""The drawing of a training step: everything that the configuration does is in it, once, and legible."""

from dataclasses import replace

import pytest

from autotuner.ir.models import Model
from autotuner.plan.configuration import Configuration
from autotuner.plan.report.diagram import Diagram, diagram
from autotuner.plan.report.drawing import LETTER, SMALL_LETTER, Drawing, PlacedBox, PlacedFlow, draw
from tests.made_up import made_up_configuration
from tests.plan.explained import explained_configuration, with_again

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def content(encoder: Configuration) -> Diagram:
    return diagram(encoder)


@pytest.fixture(scope="module")
def drawing(content: Diagram) -> Drawing:
    return draw(content)


def test_every_operator_is_in_one_box_and_every_conversion_is_a_box_of_its_own(
    encoder: Configuration, content: Diagram
) -> None:
    inside = [member.name for box in content.boxes for member in box.members if not member.again]
    assert sorted(inside) == sorted(operator.name for operator in encoder.graph().operators)
    conversions = [box for box in content.boxes if box.step_class == "conversion"]
    assert [box.step for box in conversions] == [step for step in encoder.steps if step.is_conversion]
    assert conversions
    assert not any(box.members for box in conversions)


def test_every_tensor_that_a_step_reads_or_writes_is_drawn(encoder: Configuration, content: Diagram) -> None:
    flows = {flow.made for flow in content.flows}
    for box in content.boxes:
        ports = {(port.tensor, port.form) for port in box.reads + box.makes}
        linked = {link.made for link in content.links if link.target == box.number or link.source == box.number}
        assert set(box.step.inputs + box.step.outputs) <= flows | ports | linked
    assert {made[0] for made in flows} >= {"x", "y", "grad_y", "grad_x"}
    assert len(encoder.steps) == len(content.boxes)


def test_links_and_parameters_are_what_forward_saves_for_backward(encoder: Configuration, content: Diagram) -> None:
    parameters = {
        port.tensor
        for box in content.boxes
        for port in box.reads
        if port.role == "parameter" and box.phase == "backward"
    }
    read = {name for step in encoder.steps if step.phase == "backward" for name, _ in step.inputs}
    saved = {link.made[0] for link in content.links} | parameters
    assert saved == set(encoder.graph().saved) & read
    for link in content.links:
        assert content.boxes[link.target].phase == "backward"
        assert link.source is None or content.boxes[link.source].phase == "forward"


def test_what_leaves_the_graph_is_marked(encoder: Configuration, content: Diagram) -> None:
    outputs = {flow.made[0] for flow in content.flows if flow.is_output}
    gradients = {port.tensor for box in content.boxes for port in box.makes if port.role == "gradient"}
    assert outputs == {"grad_x", "y"}
    assert outputs | gradients == set(encoder.graph().outputs)


def test_a_gradient_that_is_converted_at_the_end_is_drawn_as_it_leaves(small: Model) -> None:
    found = made_up_configuration(small)
    number, last = next(
        (n, step) for n, step in enumerate(found.steps) if any(name == "grad_weight" for name, _ in step.outputs)
    )
    made = replace(last, outputs=(("grad_weight", "hf"),))
    conversion = replace(
        last, operators=(), inputs=(("grad_weight", "hf"),), outputs=(("grad_weight", "fh"),), kernel="torch_copy"
    )
    rest = [step for step in found.steps[number + 1 :] if not step.is_conversion]
    content = diagram(replace(found, steps=(*found.steps[:number], made, conversion, *rest)))
    (leaving,) = (flow for flow in content.flows if flow.made == ("grad_weight", "fh"))
    assert leaving.is_output
    assert content.boxes[leaving.source or 0].step_class == "conversion"
    assert not any(port.tensor == "grad_weight" for box in content.boxes for port in box.makes)


def test_forward_runs_down_and_backward_up_beside_it(drawing: Drawing) -> None:
    boxes = {placed.box.number: placed for placed in drawing.boxes}
    for placed in drawing.flows:
        flow = placed.flow
        down = flow.phase == "forward"
        for target in flow.targets:
            assert (placed.y < boxes[target].y) == down
        if flow.source is not None:
            assert (boxes[flow.source].y < placed.y) == down
    forward = max(p.x + p.width for p in drawing.boxes if p.box.phase == "forward")
    assert forward < min(p.x for p in drawing.boxes if p.box.phase == "backward")


def test_boxes_and_tensors_do_not_overlap_and_lie_inside(drawing: Drawing) -> None:
    places: list[PlacedBox | PlacedFlow] = [*drawing.boxes, *drawing.flows]
    for i, one in enumerate(places):
        assert 0 <= one.x <= one.x + one.width <= drawing.width
        assert 0 <= one.y <= one.y + one.height <= drawing.height
        for other in places[:i]:
            beside = one.x + one.width <= other.x + 0.01 or other.x + other.width <= one.x + 0.01
            above = one.y + one.height <= other.y + 0.01 or other.y + other.height <= one.y + 0.01
            assert beside or above, f"{one} lies on {other}"


def test_text_fits_into_its_box(drawing: Drawing) -> None:
    for placed in drawing.boxes:
        room = placed.right - placed.left
        assert len(placed.box.step.kernel) * LETTER < room
        for member in placed.box.members:
            assert len(member.name) * LETTER + len(member.kind) * SMALL_LETTER < room
        rows = [*placed.members, *placed.reads, *placed.makes]
        assert rows == sorted(rows)
        assert rows[-1] < placed.y + placed.height


def test_a_reader_of_a_form_that_nobody_wrote_is_joined_to_what_was_written_last(small: Model) -> None:
    found = made_up_configuration(small)
    number = next(n for n, step in enumerate(found.steps) if any(name == "grad_biased" for name, _ in step.outputs))
    odd = replace(found.steps[number], outputs=(("grad_biased", "fb"),))
    steps = (*found.steps[:number], odd, *found.steps[number + 1 :])
    content = diagram(replace(found, steps=steps))
    assert ("grad_biased", "fb") in {flow.made for flow in content.flows}
    assert ("grad_biased", "bf") not in {flow.made for flow in content.flows}
    draw(content)


def test_a_box_is_wide_enough_for_what_it_computes_again(small: Model) -> None:
    found = with_again(explained_configuration(small))
    boxes = draw(diagram(found)).boxes
    (again,) = [placed for placed in boxes if placed.box.step.again]
    (member,) = again.box.members
    assert member.kind_words == "again: contraction"
    assert again.width > (len(member.name) + len(member.kind_words)) * SMALL_LETTER
    (once,) = [placed for placed in boxes if placed.box.step.operators == ("product",) and placed is not again]
    assert once.width < again.width
