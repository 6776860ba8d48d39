"""Loads targets, drafts and tokenizers by name, in any precision, or makes synthetic pairs; runs nothing."""
