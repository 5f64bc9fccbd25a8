"""A web page and a JSON API over a trained model: `ping-llm serve`."""
