"""TODO sampling."""
