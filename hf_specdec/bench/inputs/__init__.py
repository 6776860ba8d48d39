"""Prompts and questions: of exact lengths, from data sets, or given by the user."""
