"""The loop's rounds over static buffers, compiled or captured as CUDA graphs; same output as the general loop."""
