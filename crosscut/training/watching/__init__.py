"""Progress, metrics, profiles and failure diagnosis of a training run."""
