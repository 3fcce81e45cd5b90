"""The hosts under a job, and the Ray that runs on them."""
