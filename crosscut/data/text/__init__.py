"""Text of a corpus: the files that it is made of, and their documents."""
