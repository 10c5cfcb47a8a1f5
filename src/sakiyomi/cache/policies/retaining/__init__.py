"""Retaining heads: predict from a layer's projections how much a pair of key and value will be needed."""
