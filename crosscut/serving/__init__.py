"""Web server for a model, with OpenAI's protocols (completions, chat, embeddings) and an interactive page.

docs/serving.md lists the fields that clients can set. `server` starts a server and needs the packages of the optional
extra `serve`. `protocol.chat` renders chat templates and does not need these packages.
"""
