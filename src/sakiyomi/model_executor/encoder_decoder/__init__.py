"""TODO encoder_decoder."""
