"""EAGLE-3: a decoder layer on hidden states of the target drafts token by token (arXiv 2503.01840)."""
