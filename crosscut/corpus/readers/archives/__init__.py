"""Read web archives: files of the formats WARC and WET, in the form in which crawls publish them.

`members` unpacks a file, `records` splits the bytes into records, `responses` decodes HTTP, and the readers are in
`warc` and `wet`. No module stops at damage: each part that cannot be read is a reject, and the next record is searched.
"""
