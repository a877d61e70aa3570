"""Parts of `benchmarks/faults.py`: faults of the machine, and real runs that they hit."""
