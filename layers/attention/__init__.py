"""Attention kinds: what a step must know (plan), what is kept per layer (cache), and one file per kind."""
