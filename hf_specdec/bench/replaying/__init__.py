"""What drafters would have brought on answers that are known; the target decodes nothing."""
