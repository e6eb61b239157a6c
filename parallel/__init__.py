"""Rank arithmetic, live process groups and launching. Knows nothing of models or tensors."""
