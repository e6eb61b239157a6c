"""Tensor-parallel layers, V4 attention, hyper-connections and mixtures of experts."""
