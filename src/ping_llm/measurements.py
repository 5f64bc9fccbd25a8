"""The measurement schema: what every source produces and every later stage relies on.

A *measurement* says that at `event_time` the host `src_addr` probed `dst_addr` and an answer came after `rtt`
milliseconds, or none came (`rtt` is null: the probe *failed*).
"""

from typing import Final

import pyarrow as pa

SCHEMA: Final = pa.schema(
    [
        pa.field("event_time", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("src_addr", pa.string(), nullable=False),
        pa.field("dst_addr", pa.string(), nullable=False),
        pa.field("ip_version", pa.int8(), nullable=False),
        pa.field("rtt", pa.float32()),
    ]
)

MAX_RTT_MS: Final = 600_000.0
"""Ten minutes. No ping tool waits that long, so a larger value is a unit error or garbage and the row is dropped."""
