"""What everything stands on: linear algebra, execution, checks, memory, progress, atomic files, optimisation."""
