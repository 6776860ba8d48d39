"""Measuring decoding methods side by side: data, methods, metrics, measuring and reports, each on its own."""
