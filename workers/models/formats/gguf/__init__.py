"""GGUF: a model in a single file, its configuration, tokenizer and tensors."""
