"""Prompts and questions: of exact lengths, from data sets, or as the user wrote them."""
