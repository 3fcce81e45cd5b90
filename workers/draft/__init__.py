"""The draft's side of a round, and the transports that connect a target with it."""
