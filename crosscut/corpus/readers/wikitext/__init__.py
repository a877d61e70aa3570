"""Turn the markup of a MediaWiki page into prose.

`prose.prose` runs the steps in order: remove what is never prose, render the templates that carry words, show the text
of links, and remove the rest of the markup. Brackets are matched first and then read from the outside in, so the
content of a removed part is never read.
"""
