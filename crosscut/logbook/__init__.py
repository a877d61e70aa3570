"""Files of a run's folder: their schema, the rows that a run appends, and their readers.

`schema` has the names and keys, `rows` writes files of rows, `contents` reads whole files, and `following` reads what a
run has added since the last look. The package imports neither torch nor numpy, so that a command that only looks at a
run starts at once.
"""
