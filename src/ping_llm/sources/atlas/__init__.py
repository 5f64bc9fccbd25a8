"""RIPE Atlas ping results, as the API and the daily dumps have them, become measurements.

stream   file -> chunks of lines (array: a JSON array as lines)
result   one JSON object -> one ping
chunk    chunk -> batch of measurements
output   batches -> Parquet files
importer all of it, on several cores
"""

from ping_llm.sources.atlas.importer import import_atlas
from ping_llm.sources.atlas.parse import DROP_REASONS
from ping_llm.sources.atlas.report import ImportReport, InputReport

__all__ = ["DROP_REASONS", "ImportReport", "InputReport", "import_atlas"]
