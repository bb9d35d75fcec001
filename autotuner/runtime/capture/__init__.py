"""Reading a user's model: from a graph of torch's to regions that can be tuned, and back."""

from autotuner.runtime.capture.causal_hint import leave_out_the_hint
from autotuner.runtime.capture.checkpointed import CapturedModule
from autotuner.runtime.capture.region_model import Region
from autotuner.runtime.capture.rewriting import Call

__all__ = ["Call", "CapturedModule", "Region"]

leave_out_the_hint()
