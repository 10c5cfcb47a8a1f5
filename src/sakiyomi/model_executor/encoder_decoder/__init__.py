"""Encoder-decoder models: their decoder as a causal model on packed rows, and what differs between families."""
