"""Scaling of training on the machine at hand: the paper's study (section 5.1), measured.

`cases` chooses the runs to compare, `measure` trains them in turns on real ranks, `study` does both, `report` writes
the results with the planner's forecasts beside them.
"""
