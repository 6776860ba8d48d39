"""Pictures, one module a question; matplotlib is imported here only."""
