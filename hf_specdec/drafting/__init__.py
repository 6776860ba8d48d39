"""Drafters: a model, copies or both, across devices and tokenizers. Nothing here verifies drafts."""
