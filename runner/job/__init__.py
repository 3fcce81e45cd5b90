"""A job's input, journal and output."""
