"""What models and training cost, counted without building or running them."""
