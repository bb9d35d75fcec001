"""Implementations on torch, for any device that it has; imported only where they run."""
