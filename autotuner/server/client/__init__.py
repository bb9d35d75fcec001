"""The client of the service: submits jobs, follows them, and asks for configurations, over HTTP."""

from autotuner.server.client.client import Client

__all__ = ["Client"]
