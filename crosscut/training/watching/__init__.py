"""Progress, figures, profiles and diagnosis of a run."""
