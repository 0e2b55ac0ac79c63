"""What a fit costs, before it is made: layout of the network, workload, costs, choice, plan."""
