"""Scaling study on this machine: the paper's study (section 5.1), measured on real ranks.

`cases` chooses the runs to compare, `measure` trains the runs in turns, `study` calls `cases` and `measure`, and
`measured_report` shows the results next to the planner's forecasts.
"""
