"""Draft models of another tokenizer: their text in tokens of the target."""
