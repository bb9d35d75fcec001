"""Reading a user's model: from a graph of torch's to regions that can be tuned, and back."""

from autotuner.capture.region_model import Region
from autotuner.capture.rewriting import Call, Captured

__all__ = ["Call", "Captured", "Region"]
