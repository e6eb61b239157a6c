"""Collectives, ring and pipeline transfers, and token dispatch between ranks."""
