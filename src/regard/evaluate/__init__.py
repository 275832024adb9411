"""Evaluation on held-out data: each task's metrics, confusions, and the comparison with another system."""
