"""RIPE Atlas ping results, as the API and the daily dumps have them, become measurements.

parse     one JSON object -> one ping
chunks    a file -> batches of measurements
importer  files -> Parquet files: one sequence of them on several cores, or one for each file on several machines
"""

from ping_llm.sources.atlas.importer import ImportReport, import_atlas, import_by_file
from ping_llm.sources.atlas.parse import DROP_REASONS

__all__ = ["DROP_REASONS", "ImportReport", "import_atlas", "import_by_file"]
