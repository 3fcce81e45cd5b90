"""Finding, checking and loading models and tokenizers."""
