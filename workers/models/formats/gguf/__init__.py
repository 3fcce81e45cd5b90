"""GGUF: configuration, tokenizer and tensors of a model in one file."""
