"""Finds the fastest settings in a given time: candidates, races between them, and their outcome."""
