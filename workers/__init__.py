"""What runs in the pinned processes: actors, speculation, sampling, engines and models."""
