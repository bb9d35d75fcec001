"""The answer of a tuning: the configuration, where its tensors lie in memory, its explanation, and its report."""
