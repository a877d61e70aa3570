"""Judgement of the differences between the cut and the uncut step."""
