"""Pairs that a cache drops, merged into a few by trained convolutions."""
