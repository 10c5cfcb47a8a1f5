"""From logits to tokens: distributions, randomness of a request, acceptance rules."""

from sakiyomi.sampling.sampler import Sampler

__all__ = ["Sampler"]
