"""Figures from raw times and texts, as pure functions: speed, efficiency, quality; renders nothing."""
