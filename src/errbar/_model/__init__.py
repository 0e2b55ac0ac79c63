"""The user's model and data: batches, the network that is never touched, and which parameters are selected."""
