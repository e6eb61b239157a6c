"""Lossless speculation without a model: packed verify rows, acceptance, scheduling, calibration, penalties,
statistics."""
