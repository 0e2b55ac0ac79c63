"""The structures of the information: sums that add up, factors that predict."""
