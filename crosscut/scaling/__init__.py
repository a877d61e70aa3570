"""Scaling of training on this machine: the paper's study (section 5.1), measured.

`cases` chooses the runs to compare, `measure` trains them in turns on real ranks, `study` combines both, and `report`
shows the results beside the planner's forecasts.
"""
