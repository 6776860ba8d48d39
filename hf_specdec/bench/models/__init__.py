"""Loading of targets, drafts and tokenizers by name, in any precision, and making of synthetic pairs; runs nothing."""
