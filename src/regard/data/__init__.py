"""Files to examples to batches."""
