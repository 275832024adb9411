"""Search: from a source to outputs that can be steered, with scores that add up."""
