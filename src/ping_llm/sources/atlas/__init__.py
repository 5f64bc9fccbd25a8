"""RIPE Atlas ping results, as the API and the daily dumps have them, become measurements.

parse     one JSON object -> one ping
chunks    a file -> batches of measurements
output    batches -> Parquet files, and the ledger of an import file by file
importer  all of it, on several cores
"""

from ping_llm.sources.atlas.importer import ImportReport, import_atlas, import_by_file
from ping_llm.sources.atlas.parse import DROP_REASONS

__all__ = ["DROP_REASONS", "ImportReport", "import_atlas", "import_by_file"]
