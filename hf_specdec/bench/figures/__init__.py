"""Figures computed from a frame of calls: speed, rounds, efficiency, quality; measures and renders nothing."""
