"""The command line: a module for each group of commands, what they share in `options`, and all of them in `main`."""
