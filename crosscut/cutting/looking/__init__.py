"""Looks at a plain module without changing it."""
