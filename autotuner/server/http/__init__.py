"""Service: jobs, configurations and measurements over HTTP. It plans and measures nothing: workers do."""

from autotuner.server.http.application import create_app
from autotuner.server.http.serving import serve

__all__ = ["create_app", "serve"]
