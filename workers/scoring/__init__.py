"""Perplexity of a model on a text, and KL divergence and agreement of two models."""
