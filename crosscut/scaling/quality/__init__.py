"""Quality by size (paper, Figure 7 and Table 5) and the learning rate of each size (section 4.1.1).

`sizes` loads the models to compare, `runs` trains them, `study` and `rates` are the two studies, `results` holds their
figures, and `report` and `figure` show them.
"""
