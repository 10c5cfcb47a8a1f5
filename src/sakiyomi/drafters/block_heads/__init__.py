"""Block drafters: a few layers on the target's hidden states guess several tokens in one pass (arXiv 2602.06036)."""
