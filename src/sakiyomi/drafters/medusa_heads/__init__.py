"""Medusa: extra heads on the target's last hidden state propose the tokens behind the next one (arXiv 2401.10774)."""
