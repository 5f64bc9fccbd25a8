"""RIPE Atlas ping results become measurements: `parse` one JSON object, `chunks` a file, `importer` many files."""

from ping_llm.sources.atlas.importer import ImportReport, import_atlas, import_by_file
from ping_llm.sources.atlas.parse import DROP_REASONS

__all__ = ["DROP_REASONS", "ImportReport", "import_atlas", "import_by_file"]
