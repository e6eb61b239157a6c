"""Configs, checkpoints, the model, its cache, the engine and the command line."""
