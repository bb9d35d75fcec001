"""Packed batches: sequences one behind the other, without padding, and attention that stays within each of them."""
