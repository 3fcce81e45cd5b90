"""Sentences that say why an architecture is not run: some are no language models, others are not supported as GGUF."""

from __future__ import annotations

# By llama.cpp's names.
SEES = ("clip",)
GUESSES = ("dflash", "eagle3", "gemma4-assistant")
READS = (
    *("bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llama-embed", "modern-bert", "neo-bert"),
    *("nomic-bert", "nomic-bert-moe", "t5encoder"),
)
SPEAKS = ("pockettts", "qwen3tts", "wavtokenizer-dec")
FILLS_IN = ("dream", "llada", "llada-moe", "rnd1")
SEEING = "which is the vision or audio part of a model: name the file of its language model"
GUESSING = "which is a draft head of another model: name that model"
READING = "which is an embedding model: name a language model"
SPEAKING = "which is a speech model: name a language model"
FILLING_IN = "which is not autoregressive: name a model that is"
GROUPS = ((SEES, SEEING), (GUESSES, GUESSING), (READS, READING), (SPEAKS, SPEAKING), (FILLS_IN, FILLING_IN))
WHAT = {name: what for names, what in GROUPS for name in names}
USUAL = (
    "which is not run from GGUF files: give the model's checkpoint in safetensors (docs/quantised-checkpoints.md names "
    "those that are)"
)


def why_not(name: str) -> str:
    return WHAT.get(name, USUAL)
