"""The driver: sends rows to replicas and collects their answers."""
