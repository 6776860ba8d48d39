"""The methods to compare, and timed calls of them; computes no figures."""
