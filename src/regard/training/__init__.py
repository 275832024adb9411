"""Training: from a recipe to a run directory, in one process or several; and the tuning of pruned models."""
