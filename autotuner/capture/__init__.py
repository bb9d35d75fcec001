"""Reading a user's model: from a graph of torch's to regions that can be tuned, and back."""
