"""Reading a user's model: from a graph of torch's to regions that can be tuned, and back."""

from autotuner.capture.backend import compile_graph, record

__all__ = ["compile_graph", "record"]
