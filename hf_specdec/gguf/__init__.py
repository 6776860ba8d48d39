"""GGUF files as models of transformers whose weights stay in the file. Their kernels are in `prepared/kernels/`."""
