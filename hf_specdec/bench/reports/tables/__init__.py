"""Markdown tables of results, one module a task; draws no pictures."""
