"""The project's own corpus: eight subtasks with references, a held-out split, and prompts."""
