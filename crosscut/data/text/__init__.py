"""The text files of a corpus and their documents."""
