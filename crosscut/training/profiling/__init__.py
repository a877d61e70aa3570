"""Profile of a few steps of a run: operators, memory, passes of a pipeline, parts of the model."""
