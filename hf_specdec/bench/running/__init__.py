"""The methods that are compared, and one timed call of each; computes no figures."""
