"""Building of a search space: every choice and conversion of a graph that a search space file admits."""

import autotuner.kernels.rules  # noqa: F401  (registers every kernel)
from autotuner.ir.graph import Graph
from autotuner.ir.numerics import Numerics, allowed_classes
from autotuner.kernels import KERNELS
from autotuner.space.choices import Space
from autotuner.space.conversions import changing_formats, conversions_of, reachable
from autotuner.space.enumeration import Enumeration, Size, form_domains
from autotuner.space.files import SpaceFile
from autotuner.space.fusion import covers, stack_families


def build_space(
    graph: Graph, file: SpaceFile, *, saving: bool = False, numerics: Numerics = "exact", vendor: str | None = None
) -> Space:
    """Enumerate the space of a graph.

    Args:
        graph: forward or training.
        file: which kernels and conversions to try.
        saving: whether to try what costs time and saves memory, too: tensors that change their storage format, such as
            dropout masks packed into bits, and formats for that alone, such as seeds.
        numerics: the class of storage formats and kernels that is allowed.
        vendor: of the device: kernels that do not run on such devices are left out; None for all kernels.

    Raises:
        SpaceError: the space is too large.
    """
    size = Size(graph.name)
    allowed = allowed_classes(numerics)
    kernels = tuple(
        name for name in file.kernels
        if KERNELS[name].needs in allowed and (vendor is None or not KERNELS[name].refuses_vendor(vendor))
    )  # fmt: skip
    found = size.covers(covers(graph, kernels, file.max_operators, repeats=file.repeats))
    families = stack_families(graph)
    given = given_forms(graph)
    enumerated = Enumeration(graph, file, families, given, size, saving=saving, numerics=numerics)
    anchored = size.kept(choice for cover in found for choice in enumerated.choices(cover, anchors=True))
    domains = form_domains(graph, anchored, given)
    following = size.kept(
        choice for cover in found for choice in enumerated.choices(cover, anchors=False, domains=domains)
    )
    changing = changing_formats(numerics, saving=saving)
    choices = reachable(graph, anchored + following, given, convert=bool(file.conversions), changing=changing)
    conversions = size.kept(conversions_of(graph, choices, given, file.conversions, changing))
    return Space(graph, tuple(choices), tuple(conversions), given, enumerated.sampled_cells(choices), file.device_type)


def given_forms(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return the forms that tensors may have where the graph meets its caller.

    Inputs, parameters, outputs and their gradients are as declared: contiguous, as the framework makes them.
    """
    return {
        name: (tensor.axes,)
        for name, tensor in graph.tensors.items()
        if tensor.role in ("input", "parameter") or name in graph.given_gradients or name in graph.outputs
    }
