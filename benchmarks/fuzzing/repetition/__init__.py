"""Inputs that are built by repetition, from 64 kB to 16 MB, and the time and memory that each byte of them takes."""
