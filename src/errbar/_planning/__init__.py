"""What a fit will cost: layout of the network, workload, costs, choice, plan."""
