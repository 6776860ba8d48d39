"""Pictures of results, one module a task; matplotlib is imported here only."""
