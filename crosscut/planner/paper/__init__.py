"""Compare the planner's forecasts with the figures of the paper and of other publications."""
