"""Several processes: the team of ranks, which of them reads what, and one sum of all."""
