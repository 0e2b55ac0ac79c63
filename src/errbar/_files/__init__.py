"""Files: the container, what is in it, checkpoints, loading."""
