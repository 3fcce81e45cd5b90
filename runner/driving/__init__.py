"""The driver: rows to replicas, and their answers back."""
