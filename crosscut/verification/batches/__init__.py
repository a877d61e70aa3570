"""Batches of the verified step, with made-up tokens, targets and labels, and the comparison of packed documents with
separate ones.
"""
