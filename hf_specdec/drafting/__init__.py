"""Drafters: a model, prompt lookup or both, across devices and tokenizers. Nothing here verifies drafts."""
