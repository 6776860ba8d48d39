"""The instrument behind `assisted_generation.py`: measures decoding methods side by side; decodes nothing itself."""
