"""The foundations: linear algebra, execution, checks, memory, progress, atomic files, optimisation."""
