"""Figures as functions of a frame of calls: speed, rounds, efficiency, quality; measures and renders nothing."""
