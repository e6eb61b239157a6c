"""Training of drafts: losses and the geometry of training blocks."""
