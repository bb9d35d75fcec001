"""Service: jobs, configurations and measurements over HTTP. It plans and measures nothing: workers do."""

from autotuner.service.application import create_app
from autotuner.service.serving import serve

__all__ = ["create_app", "serve"]
