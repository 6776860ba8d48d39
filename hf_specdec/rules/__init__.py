"""Acceptance rules, probabilities, draws and statistics: pure functions, without forward passes or caches."""
