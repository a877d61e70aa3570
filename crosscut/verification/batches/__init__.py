"""Made-up batches of the verified step (tokens, targets and labels), and a check that compares packed documents with
separate ones.
"""
