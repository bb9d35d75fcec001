"""A graph and a search space file -> every choice and conversion."""

import autotuner.kernels.catalogue  # noqa: F401  (registers every kernel)
from autotuner.fusion import covers, stack_families
from autotuner.graph import Graph
from autotuner.space.choices import Space
from autotuner.space.conversions import conversions_of, reachable
from autotuner.space.enumeration import Enumeration, form_domains
from autotuner.space.files import SpaceFile
from autotuner.space.given import given_forms


def build_space(graph: Graph, file: SpaceFile) -> Space:
    """Enumerate the space of a graph."""
    found = tuple(covers(graph, tuple(file.kernels), file.max_operators))
    families = stack_families(graph)
    given = given_forms(graph, families)
    enumerated = Enumeration(graph, file, families, given)
    anchored = [choice for cover in found for choice in enumerated.choices(cover, anchors=True)]
    domains = form_domains(graph, anchored, given)
    following = [choice for cover in found for choice in enumerated.choices(cover, anchors=False, domains=domains)]
    choices = reachable(graph, anchored + following, given, convert=bool(file.conversions))
    conversions = tuple(conversions_of(graph, choices, given, file.conversions))
    return Space(graph, tuple(choices), conversions, given)
