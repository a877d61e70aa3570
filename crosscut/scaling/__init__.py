"""How training scales on the machine at hand: the paper's study (section 5.1), measured.

`cases` says which runs are compared, `measure` trains them in turns on real ranks, `study` is both together, `report`
writes what was found, with the planner's forecasts beside it.
"""
