"""Encoder-decoder models on the engine: what the encoder read, the decoder as a causal model, what a user gives.

Nothing else of the library knows that a model has an encoder: a request carries a `Source`, the packed model reads it
when it takes its place, and the decoder's rows go through the same loop as those of any other model.
"""
