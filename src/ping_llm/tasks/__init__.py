"""Where work runs when one machine, or our own trainer, is too small."""
