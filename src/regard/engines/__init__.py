"""Other engines that answer with our models, by the same call as our own search."""
