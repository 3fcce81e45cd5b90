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
SEEING = "which is what a model sees or hears with: name the file of its language model"
GUESSING = "which guesses tokens of another model, and is none by itself: name that model"
READING = "which makes vectors of texts and writes none: name a language model"
SPEAKING = "which makes sounds and writes no texts: name a language model"
FILLING_IN = "which does not write texts from left to right: name a model that does"
GROUPS = ((SEES, SEEING), (GUESSES, GUESSING), (READS, READING), (SPEAKS, SPEAKING), (FILLS_IN, FILLING_IN))
WHAT = {name: what for names, what in GROUPS for name in names}
USUAL = "which is not run from GGUF files: give the model's checkpoint in safetensors (docs/models.md names those that are)"


def why_not(name: str) -> str:
    return WHAT.get(name, USUAL)
