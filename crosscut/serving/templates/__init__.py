"""Render chat templates in a separate process. A template is a Jinja program that the model's author wrote."""
