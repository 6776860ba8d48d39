"""Rounds over static buffers whose steps are compiled, or captured as CUDA graphs."""
