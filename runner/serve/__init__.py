"""The batch server: OpenAI's files and batches over job directories, and single requests beside them."""
