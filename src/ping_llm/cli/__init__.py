"""Commands that need more than a few lines: each is a function for the command line to register."""
