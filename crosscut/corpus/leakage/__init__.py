"""Test sets that the corpus must not hold: what they share with it is found, reported and cut out (paper, 4.1.2).

Three stages. `test-sets` gathers the 8-grams of all test sets and a Bloom filter of them. `leakage`, a filter, asks the
Bloom filter for every 8-gram of every document, confirms each hit word by word, and cuts or drops. `overlap` adds up
what share of each test set was found.
"""
