"""Processes: children of this one, ranks of a training, machines of a Ray cluster. Imports no torch."""
