"""Who runs where: the machine as it is, and plans for it."""
