"""Forecast of the peak memory of one rank in a training step."""

from crosscut.planner.memory.forecast import forecast_instants, forecast_memory
from crosscut.planner.memory.instants import MemoryForecast

__all__ = ["MemoryForecast", "forecast_instants", "forecast_memory"]
