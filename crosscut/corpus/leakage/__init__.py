"""Find text of test sets in the corpus, report it, and cut it out (paper, 4.1.2).

There are three stages. `test-sets` gathers the 8-grams of all test sets and makes a Bloom filter of them. `leakage`, a
filter, looks up every 8-gram of every document in the Bloom filter, confirms each hit word by word, and cuts passages
or drops documents. `overlap` computes the share of each test set that the corpus contains.
"""
