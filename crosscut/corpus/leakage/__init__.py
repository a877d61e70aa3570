"""Find text of test sets in the corpus, report it, and cut it out (paper, 4.1.2).

There are three stages. `test-sets` gathers the n-grams (sequences of `leakage.ngram` words, 8 by default) of all test
sets and makes a Bloom filter of the n-grams. `leakage` looks up every n-gram of every document in the Bloom filter,
confirms each hit word by word, and cuts out passages or drops documents. `overlap` computes the share of each test set
that the corpus contains.
"""
