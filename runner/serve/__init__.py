"""The batch server: OpenAI's files and batches API over job directories, and single requests beside them."""
