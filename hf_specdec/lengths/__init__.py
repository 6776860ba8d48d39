"""When a draft stops and how long it should be; times are passed in, nothing here reads a clock."""
