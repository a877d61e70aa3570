"""Run the stages of a corpus: tasks and their records, the order of the stages, and the engine that runs the tasks."""
