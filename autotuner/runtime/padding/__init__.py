"""Calls of changing shapes: batches are padded to a shape that is compiled already, where that changes no value."""
