"""Drafters: a model, copies or both, across devices and tokenizers. No verification."""
