"""The cost of models and of training, counted without building or running them."""
