"""Extract the main text of web pages: fast, with rules and resiliparse, or carefully, with trafilatura."""
