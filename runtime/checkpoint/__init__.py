"""Checkpoints: strict headers, canonical names, slices that are dequantised as they are read."""

from .folder import bundled_model as bundled_model
from .inspection import Inspection as Inspection
from .inspection import inspect_checkpoint as inspect_checkpoint
from .random_weights import RandomWeights as RandomWeights
from .reader import CheckpointReader as CheckpointReader
from .safetensors_file import CheckpointError as CheckpointError
from .spec import TensorSpec as TensorSpec
from .spec import expected_tensors as expected_tensors
