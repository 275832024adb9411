"""Models from elsewhere: read as runs, and runs written for elsewhere."""
