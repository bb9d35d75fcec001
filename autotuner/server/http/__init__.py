"""Service: jobs, configurations and measurements over HTTP. It plans and measures nothing: workers do."""

from autotuner.server.http.access import Quota
from autotuner.server.http.application import create_app
from autotuner.server.http.serving import ServiceOptions, listen, serve

__all__ = ["Quota", "ServiceOptions", "create_app", "listen", "serve"]
