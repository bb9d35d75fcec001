"""Implementations that torch's Inductor compiles."""
