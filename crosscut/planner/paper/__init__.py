"""Forecasts beside the figures of the paper and of other publications."""
