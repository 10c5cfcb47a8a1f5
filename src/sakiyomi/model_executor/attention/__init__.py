"""Attention backends: what computes attention of packed rows over the slots of a cache."""
