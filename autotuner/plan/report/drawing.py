"""A diagram with places: forward from the top down, backward beside it from the bottom up, in pixels."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autotuner.plan.phrases import duration, short_form
from autotuner.plan.report.diagram import PHASES, Box, BoxTensor, Diagram, Flow, Link, Made, Phase
from autotuner.plan.report.layered import NodeSize, Placement, place, spread

LETTER = 6.65
"""Width of a letter of a fixed-width font at 11 pixels: 0.6 em, and a little more for the fonts that are wider."""
SMALL_LETTER = 6.05
HEAD, ROW, PORT_ROW, INSET = 24.0, 17.0, 15.0, 10.0
POINT = 10.0
"""The distance by which the points of a conversion's box, a hexagon, reach beyond its corners."""
LABEL = 19.0
MARGIN, GUTTER, TITLES = 16.0, 90.0, 34.0
PORT_GAP = 13.0

Point = tuple[float, float]


@dataclass(frozen=True)
class PlacedBox:
    """A box with its upper left corner; rows carry the y of their text's base line."""

    box: Box
    x: float
    y: float
    width: float
    height: float
    members: tuple[float, ...]
    reads: tuple[float, ...]
    makes: tuple[float, ...]

    @property
    def left(self) -> float:
        """The left edge of text."""
        return self.x + _inset(self.box)

    @property
    def right(self) -> float:
        """The right edge of text."""
        return self.x + self.width - _inset(self.box)

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass(frozen=True)
class PlacedFlow:
    flow: Flow
    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass(frozen=True, slots=True)
class Line:
    """A drawn edge: a path, the boxes that it joins, and which tensor it is.

    `into` tells whether it ends at a reader, and so has an arrow's head; `saved` whether it leads to another phase.
    """

    path: str
    made: Made
    boxes: tuple[int, ...]
    into: bool = False
    saved: bool = False


@dataclass(frozen=True)
class Drawing:
    """Everything with its place. `titles` are the left edges of the phases that are there."""

    width: float
    height: float
    titles: tuple[tuple[Phase, float], ...]
    boxes: tuple[PlacedBox, ...]
    flows: tuple[PlacedFlow, ...]
    lines: tuple[Line, ...]


def draw(diagram: Diagram) -> Drawing:
    """Return a diagram with places."""
    panels = {phase: _Panel(diagram, phase) for phase in PHASES}
    height = max(panel.placement.height for panel in panels.values())
    titles: list[tuple[Phase, float]] = []
    boxes: list[PlacedBox] = []
    flows: list[PlacedFlow] = []
    lines: list[Line] = []
    left = MARGIN
    for phase, panel in panels.items():
        if not panel.boxes:
            continue
        titles.append((phase, left))
        panel.put(left, TITLES, height)
        boxes += panel.placed_boxes()
        flows += panel.placed_flows()
        lines += panel.lines()
        left += panel.placement.width + GUTTER
    lines += _links(diagram.links, boxes, flows)
    width = left - GUTTER + MARGIN if titles else 2 * MARGIN
    return Drawing(width, TITLES + height + MARGIN, tuple(titles), tuple(boxes), tuple(flows), tuple(lines))


class _Panel:
    """The boxes and flows of one phase, placed from the top down; backward is turned over when it is put down."""

    def __init__(self, diagram: Diagram, phase: Phase) -> None:
        self.phase = phase
        self.boxes = {f"box {box.number}": box for box in diagram.boxes if box.phase == phase}
        self.flows = {f"flow {i}": flow for i, flow in enumerate(diagram.flows) if flow.phase == phase}
        self.sizes = {key: _box_size(box) for key, box in self.boxes.items()}
        self.sizes |= {key: _flow_size(flow) for key, flow in self.flows.items()}
        self.edges = list(self._edges())
        self.placement: Placement = place(self.sizes, self.edges, close=self.flows)
        self.left = self.top = 0.0
        self.height = self.placement.height

    def put(self, left: float, top: float, height: float) -> None:
        """Say where the panel lies, and how high the drawing is."""
        self.left, self.top, self.height = left, top, height

    def _edges(self) -> Iterator[tuple[str, str]]:
        for key, flow in self.flows.items():
            if flow.source is not None:
                yield f"box {flow.source}", key
            for target in flow.targets:
                yield key, f"box {target}"

    def _y(self, y: float) -> float:
        return self.top + (y if self.phase == "forward" else self.height - y)

    def _corner(self, key: str) -> Point:
        size = self.sizes[key]
        top = self.placement.tops[key]
        y = self._y(top) if self.phase == "forward" else self._y(top + size.height)
        return self.left + self.placement.centres[key] - size.width / 2, y

    def placed_boxes(self) -> Iterator[PlacedBox]:
        for key, box in self.boxes.items():
            x, y = self._corner(key)
            row = y + HEAD
            members = []
            for _ in box.members or [None]:
                row += ROW
                members.append(row - 5)
            row += 4 if box.reads or box.makes else 0
            ports = []
            for _ in box.reads + box.makes:
                row += PORT_ROW
                ports.append(row - 4)
            split = len(box.reads)
            size = self.sizes[key]
            yield PlacedBox(
                box, x, y, size.width, size.height, tuple(members), tuple(ports[:split]), tuple(ports[split:])
            )

    def placed_flows(self) -> Iterator[PlacedFlow]:
        for key, flow in self.flows.items():
            size = self.sizes[key]
            yield PlacedFlow(flow, *self._corner(key), size.width, size.height)

    def lines(self) -> Iterator[Line]:
        entries, exits = self._ends()
        for edge in self.edges:
            source, target = edge
            bottom = self.placement.tops[source] + self.sizes[source].height
            points = [(exits.get(edge, self.placement.centres[source]), bottom)]
            for x, upper, lower in self.placement.bends[edge]:
                points += [(x, upper), (x, lower)]
            points.append((entries.get(edge, self.placement.centres[target]), self.placement.tops[target]))
            flow = self.flows[target] if target in self.flows else self.flows[source]
            joined = [self.boxes[key].number for key in edge if key in self.boxes]
            if source in self.flows and flow.source is not None:
                joined.append(flow.source)
            path = _curve([(self.left + x, self._y(y)) for x, y in points])
            yield Line(path, flow.made, tuple(joined), into=target in self.boxes)

    def _ends(self) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], float]]:
        """Return where along a box's edges its lines enter and leave: straight ahead where there is room."""
        entering: dict[str, list[tuple[float, tuple[str, str]]]] = defaultdict(list)
        leaving: dict[str, list[tuple[float, tuple[str, str]]]] = defaultdict(list)
        for edge in self.edges:
            source, target = edge
            bends = self.placement.bends[edge]
            if target in self.boxes:
                entering[target].append((bends[-1][0] if bends else self.placement.centres[source], edge))
            if source in self.boxes:
                leaving[source].append((bends[0][0] if bends else self.placement.centres[target], edge))
        return self._along(entering), self._along(leaving)

    def _along(self, ends: Mapping[str, Sequence[tuple[float, tuple[str, str]]]]) -> dict[tuple[str, str], float]:
        found: dict[tuple[str, str], float] = {}
        for box, wanted in ends.items():
            centre, half = self.placement.centres[box], self.sizes[box].width / 2 - 12
            inside = sorted((min(max(x, centre - half), centre + half), edge) for x, edge in wanted)
            gap = min(PORT_GAP, 2 * half / max(1, len(inside) - 1))
            places = spread([x for x, _ in inside], [0.0] * len(inside), gap)
            shift = max(0.0, centre - half - places[0]) - max(0.0, places[-1] - centre - half)
            found |= {edge: x + shift for x, (_, edge) in zip(places, inside, strict=True)}
        return found


def _box_size(box: Box) -> NodeSize:
    step = box.step
    head = len(step.kernel) * LETTER + (len(duration(step.predicted_us)) + 4) * SMALL_LETTER
    rows = [14 + len(m.name) * LETTER + (len(m.kind_words) + 2) * SMALL_LETTER for m in box.members]
    if step.is_conversion:
        (tensor, source), (_, target) = step.inputs[0], step.outputs[0]
        rows.append((len(tensor) + len(short_form(source)) + len(short_form(target)) + 5) * LETTER)
    rows += [14 + (len(p.tensor) + len(short_form(p.form)) + 2) * SMALL_LETTER for p in box.reads + box.makes]
    ports = len(box.reads) + len(box.makes)
    height = HEAD + max(1, len(box.members)) * ROW + ports * PORT_ROW + (4 if ports else 0) + 5
    return NodeSize(max(head, *rows, 130.0) + 2 * _inset(box), height)


def _inset(box: Box) -> float:
    return INSET + (POINT if box.step.is_conversion else 0.0)


def _flow_size(flow: Flow) -> NodeSize:
    tensor, form = flow.made
    return NodeSize((len(tensor) + len(short_form(form)) + 1) * LETTER + 16, LABEL)


def _curve(points: Sequence[Point]) -> str:
    """Return a path through points: vertical at each of them."""
    parts = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (x, y), (to_x, to_y) in pairwise(points):
        if abs(x - to_x) < 0.5:
            parts.append(f"L{to_x:.1f} {to_y:.1f}")
        else:
            middle = (y + to_y) / 2
            parts.append(f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}")
    return " ".join(parts)


def _links(links: Iterable[Link], boxes: Iterable[PlacedBox], flows: Iterable[PlacedFlow]) -> Iterator[Line]:
    """Yield the lines of saved tensors: from the right of what makes them to the left of the boxes that read them."""
    by_number = {placed.box.number: placed for placed in boxes}
    by_made = {placed.flow.made: placed for placed in flows}
    for link in links:
        reader = by_number[link.target]
        end = reader.x, _port_y(reader, reader.box.reads, reader.reads, link.made)
        flow = by_made.get(link.made)
        if flow is not None:
            start = flow.x + flow.width, flow.middle
        elif link.source is not None:
            maker = by_number[link.source]
            start = maker.x + maker.width, _port_y(maker, maker.box.makes, maker.makes, link.made)
        else:
            continue
        reach = max(40.0, (end[0] - start[0]) / 2)
        path = (
            f"M{start[0]:.1f} {start[1]:.1f} C{start[0] + reach:.1f} {start[1]:.1f} "
            f"{end[0] - reach:.1f} {end[1]:.1f} {end[0]:.1f} {end[1]:.1f}"
        )
        joined = (link.target,) if link.source is None else (link.source, link.target)
        yield Line(path, link.made, joined, into=True, saved=True)


def _port_y(placed: PlacedBox, ports: Sequence[BoxTensor], rows: Sequence[float], made: Made) -> float:
    """Return where a tensor's line meets a box: at its row, or at the point of a conversion, which has no rows."""
    of_port = (row - 3 for port, row in zip(ports, rows, strict=True) if (port.tensor, port.form) == made)
    return next(of_port, placed.middle)
