"""Tiny models, pairs and tokenizers that the tests share."""
