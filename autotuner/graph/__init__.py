"""Operators, tensors, and the dataflow graph that they form."""

from autotuner.graph.autodiff import training_graph
from autotuner.graph.dataflow import Graph, Operator, Role, Tensor
from autotuner.graph.kinds import ELEMENT_BYTES, KINDS, Kind, check_operator

__all__ = ["ELEMENT_BYTES", "KINDS", "Graph", "Kind", "Operator", "Role", "Tensor", "check_operator", "training_graph"]
