"""Retaining heads: how much a pair of key and value will be needed, told from the layer's own projections."""
