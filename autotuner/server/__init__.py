"""The service: the REST API, the workers that run its jobs, and a client of it."""
