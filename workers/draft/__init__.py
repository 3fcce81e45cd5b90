"""The draft's side of a round, and the way to it."""
