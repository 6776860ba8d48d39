"""Acceptance rules, probabilities, draws and statistics: pure functions. No forward passes and no caches."""
