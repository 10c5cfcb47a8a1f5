"""Key-value caches of running requests."""
