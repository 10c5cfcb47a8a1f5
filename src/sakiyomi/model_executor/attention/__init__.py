"""TODO attention."""
