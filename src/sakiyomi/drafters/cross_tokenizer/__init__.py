"""TODO cross_tokenizer."""
