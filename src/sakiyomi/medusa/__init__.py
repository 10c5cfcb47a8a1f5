"""Medusa: further heads on the target's last hidden state guess the tokens after the next one (arXiv 2401.10774)."""
