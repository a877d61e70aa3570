"""Recomputation of activations, and offload of activations and moments to host memory. Recomputation and offload save
device memory and cost time.
"""
