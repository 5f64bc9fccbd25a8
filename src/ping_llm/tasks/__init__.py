"""Where tasks run: worker processes of this machine, or a Ray cluster."""
