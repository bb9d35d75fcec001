"""Intermediate representation: a training step as a graph of operators over tensors, and how tensors lie in memory."""
