"""The experiments: the networks, how they are trained, and the methods they are compared with."""
