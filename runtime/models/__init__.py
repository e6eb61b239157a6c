"""Models: one file each, built from the layers."""
