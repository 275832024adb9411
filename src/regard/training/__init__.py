"""Training: the loop, what it saves, and the processes it runs in."""
