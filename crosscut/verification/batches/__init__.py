"""Batches of the verified step: made-up tokens, targets and labels, and packed documents beside separate ones."""
