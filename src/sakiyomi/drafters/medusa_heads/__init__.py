"""Medusa: extra heads on the target's last hidden state propose the tokens after the next one (arXiv 2401.10774)."""
