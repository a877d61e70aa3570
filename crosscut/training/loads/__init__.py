"""Loads of the experts of a run: the record in its folder, the picture of the record, and the search for experts that
get no tokens.
"""
