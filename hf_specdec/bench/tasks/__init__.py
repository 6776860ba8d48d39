"""One module a task of `--task`: what it runs, in which order, and what it writes."""
