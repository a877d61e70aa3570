"""Recomputation of activations, and offload of activations and moments to host memory. Both save device memory at the
cost of time.
"""
