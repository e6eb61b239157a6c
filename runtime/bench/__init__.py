"""Benchmarks behind ``dspark bench``: each states its baseline and measures it in the same run.

Times of two systems are taken in alternating rounds on one thread, and medians are shown, so that whatever else the
machine does hits both. Absolute figures belong to the machine; ratios are what to compare.
"""
