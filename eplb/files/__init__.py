"""Files of loads and of maps: our own, sglang's, vLLM's, TensorRT-LLM's, and plain npz, json and csv."""

from .loads import Loads, read_loads
from .maps import MapFile, read_map, write_map

__all__ = ["Loads", "MapFile", "read_loads", "read_map", "write_map"]
