"""The networks: the language model (`lm`), the completer, and the layers that both share."""
