"""Words of a text, their hashes, their n-grams, and their positions in the text.

The search for duplicates and the search for test data use the same words and the same hashes.
"""
