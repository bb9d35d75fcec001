"""The request of a tuning, and its answer: configuration, memory plan, explanation and report."""
