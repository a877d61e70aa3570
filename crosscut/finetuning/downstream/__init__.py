"""Fine-tune a model for a task with labels: classes, spans or choices (docs/finetuning.md)."""
