"""Page that shows the runs of this machine while they train: `crosscut watch`.

`source` binds the reader of a run's files, `told` says what is new in a run since a page asked last, `server` answers
the page, and `pages` assembles it, also as one file that opens without a server.
"""
