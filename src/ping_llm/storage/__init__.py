"""Files wherever they are: local paths, `s3://` and `gs://` through one small interface."""

from ping_llm.storage.location import Location, locate
from ping_llm.storage.stores import MissingError, StorageError

__all__ = ["Location", "MissingError", "StorageError", "locate"]
