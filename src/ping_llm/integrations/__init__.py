"""Other people's machinery on our data path: stock MaxText, Modal."""
