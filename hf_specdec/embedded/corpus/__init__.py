"""The generated corpus: eight subtasks with reference answers, a held-out split, and the prompt format; no models."""
