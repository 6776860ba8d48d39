"""The benchmark of `assisted_generation.py`: measures decoding methods side by side; decodes nothing itself."""
