"""Read web archives: WARC and WET files, as crawls publish them.

`members` unpacks a file, `records` splits the bytes into records, `responses` decodes HTTP, and the readers are in
`warc` and `wet`. Damage does not end the reading of a file: each part that cannot be read becomes a reject, and reading
continues at the next record.
"""
