"""Parts of `benchmarks/corpus/deduplicate.py`: the corpus, the programs to measure, and the quality of the results."""
