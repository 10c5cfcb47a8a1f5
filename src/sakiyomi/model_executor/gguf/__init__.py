"""GGUF files (llama.cpp's): their models, tokenizers and blocks, read as they are, and written."""
