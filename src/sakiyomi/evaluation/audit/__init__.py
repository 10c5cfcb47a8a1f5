"""TODO audit."""
