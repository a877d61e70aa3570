"""Fine-tuning of trained models: conversations (`chat`), and tasks with their scores (`tasks`)."""
