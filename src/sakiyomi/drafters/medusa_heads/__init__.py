"""TODO medusa_heads."""
