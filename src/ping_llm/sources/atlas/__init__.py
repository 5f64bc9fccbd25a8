"""RIPE Atlas ping results, as the API and the daily dumps have them, become measurements.

parse     one JSON object -> one ping
chunks    a file -> batches of measurements
importer  all files -> one sequence of Parquet files, on several cores
by_file   each file -> a Parquet file of its own and an entry of the ledger, on several machines
"""

from ping_llm.sources.atlas.by_file import import_by_file
from ping_llm.sources.atlas.importer import ImportReport, import_atlas
from ping_llm.sources.atlas.parse import DROP_REASONS

__all__ = ["DROP_REASONS", "ImportReport", "import_atlas", "import_by_file"]
