"""Engines over one pair of models, batches of rows, in turn: see ``__main__``."""
