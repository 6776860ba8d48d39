"""Who drafts: a model, look-up, both, across devices or tokenizers; nothing here accepts a token."""
