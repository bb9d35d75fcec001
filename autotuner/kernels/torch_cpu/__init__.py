"""Implementations on torch for the CPU; imported only where they run."""
