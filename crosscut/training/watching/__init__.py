"""Progress, metrics and failure diagnosis of a training run."""
