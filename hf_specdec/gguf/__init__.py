"""Loads GGUF files as models of transformers whose weights stay in the file. The kernels are in `prepared/kernels/`."""
