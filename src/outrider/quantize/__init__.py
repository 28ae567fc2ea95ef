"""`outrider quantize`: models in floating point become compressed-tensors checkpoints. Reading them is model/formats."""
