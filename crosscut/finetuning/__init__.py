"""Fine-tuning of trained models: tasks and their scores."""
