"""What the text backends share: tokenizers, documents in files, and how documents become sequences."""
