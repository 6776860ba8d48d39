"""What is on disk: the journal of an unfinished run, finished results, the environment they came from."""
