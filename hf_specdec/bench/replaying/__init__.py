"""What drafters would have gained on known answers; the target decodes nothing."""
