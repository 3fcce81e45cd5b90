"""A job's input, admission, journal, results and directory."""
