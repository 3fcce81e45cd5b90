"""How well a model predicts a text, and how far two models lie apart on it."""
