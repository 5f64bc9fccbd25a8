"""What ping tools and monitoring systems really write, and the measurements in it: time, source, destination, RTT.

From runs of the tools (fping 5.1, iputils 20221126, mtr 0.95, rrdtool 1.7.2 with the data sources of SmokePing), and
from their documentation and tests. The addresses are those of documentation.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

Measured = tuple[float | None, str, str, float | None]


class Sample(NamedTuple):
    reader: str
    file: str
    text: str
    measured: Sequence[Measured]


def _each(time_s: float | None, src: str, dst: str, *rtts: float | None) -> list[Measured]:
    """Packets of one report, a microsecond apart."""
    return [(None if time_s is None else time_s + number / 1e6, src, dst, rtt) for number, rtt in enumerate(rtts)]


HERE: Final = "192.0.2.10"
A, B, V6 = "198.51.100.1", "203.0.113.9", "2001:db8::1"

PING_LINUX = Sample(
    "ping",
    "192.0.2.10.txt",
    """\
PING example.com (198.51.100.1) 56(84) bytes of data.
64 bytes from one.example.com (198.51.100.1): icmp_seq=1 ttl=64 time=0.114 ms
64 bytes from one.example.com (198.51.100.1): icmp_seq=2 ttl=64 time=36.1 ms
64 bytes from one.example.com (198.51.100.1): icmp_seq=2 ttl=64 time=36.2 ms (DUP!)
From 192.0.2.254 icmp_seq=3 Destination Host Unreachable
64 bytes from one.example.com (198.51.100.1): icmp_seq=6 ttl=64 time=1037 ms

--- example.com ping statistics ---
7 packets transmitted, 3 received, +1 duplicates, +1 errors, 57% packet loss, time 6085ms
rtt min/avg/max/mdev = 0.114/358/1037/0.036 ms, pipe 2
""",
    [(None, HERE, A, rtt) for rtt in (0.114, 36.1, 1037.0, None, None, None, None)],
)
PING_D = Sample(
    "ping",
    "ping-192.0.2.10.log",
    """\
PING 198.51.100.1 (198.51.100.1) from 192.0.2.11 eth0: 56(84) bytes of data.
[1644854959.400000] 64 bytes from 198.51.100.1: icmp_seq=2 ttl=64 time=6.51 ms
[1644854961.400000] no answer yet for icmp_seq=3
[1644854962.400000] no answer yet for icmp_seq=4
[1644854962.900000] 64 bytes from 198.51.100.1: icmp_seq=4 ttl=64 time=1500 ms
[1644854963.400000] 64 bytes from 198.51.100.1: icmp_seq=5 ttl=64 time=6.53 ms
[1644854967.400000] 64 bytes from 198.51.100.1: icmp_seq=7 ttl=64 time=6.54 ms
""",
    [
        (1644854959.4, "192.0.2.11", A, 6.51),
        (1644854962.9, "192.0.2.11", A, 1500.0),
        (1644854963.4, "192.0.2.11", A, 6.53),
        (1644854967.4, "192.0.2.11", A, 6.54),
        (1644854958.4, "192.0.2.11", A, None),  # packets are mostly a second apart
        (1644854961.4, "192.0.2.11", A, None),
        (1644854965.4, "192.0.2.11", A, None),
    ],
)
PING_QUIET = Sample(
    "ping",
    "ping.txt",
    """\
PING 2001:db8::1(2001:db8::1) 56 data bytes

--- 2001:db8::1 ping statistics ---
4 packets transmitted, 3 received, 25% packet loss, time 3006ms
rtt min/avg/max/mdev = 0.036/0.062/0.114/0.036 ms
""",
    [(None, "localhost", V6, rtt) for rtt in (0.062, 0.062, 0.062, None)],
)
PING_MACOS = Sample(
    "ping",
    "ams1_ping.txt",
    """\
PING example.com (203.0.113.9): 56 data bytes
Request timeout for icmp_seq 0
Request timeout for icmp_seq 1
92 bytes from 192.0.2.254: Destination Host Unreachable
Vr HL TOS  Len   ID Flg  off TTL Pro  cks      Src      Dst
 4  5  00 5400 1a39   0 0000  40  01 f6e3 192.0.2.10  203.0.113.9
64 bytes from 203.0.113.9: icmp_seq=2 ttl=54 time=131.812 ms
64 bytes from 203.0.113.9: icmp_seq=3 ttl=54 time=68.993 ms

--- example.com ping statistics ---
4 packets transmitted, 2 packets received, 50.0% packet loss
round-trip min/avg/max/stddev = 68.993/100.4/131.812/3.158 ms
PING6(56=40+8+8 bytes) 2001:db8::5 --> 2001:db8::1
16 bytes from 2001:db8::1, icmp_seq=0 hlim=52 time=5.012 ms
""",
    [
        *[(None, "ams1", B, rtt) for rtt in (131.812, 68.993, None, None)],
        (None, "2001:db8::5", V6, 5.012),
    ],
)
PING_BUSYBOX = Sample(
    "ping",
    "router.log",
    """\
PING 198.51.100.1 (198.51.100.1): 56 data bytes
64 bytes from 198.51.100.1: seq=0 ttl=118 time=12.345 ms
64 bytes from 198.51.100.1: seq=2 ttl=118 time=12.001 ms
""",
    [(None, "router", A, rtt) for rtt in (12.345, 12.001, None)],
)
PING_WINDOWS = Sample(
    "ping",
    "desk-7.txt",
    """\

Pinging example.com [203.0.113.9] with 32 bytes of data:
Reply from 203.0.113.9: bytes=32 time=11ms TTL=56
Reply from 203.0.113.9: bytes=32 time<1ms TTL=56
Request timed out.
Reply from 192.0.2.254: Destination host unreachable.

Ping statistics for 203.0.113.9:
    Packets: Sent = 4, Received = 3, Lost = 1 (25% loss),
Approximate round trip times in milli-seconds:
    Minimum = 0ms, Maximum = 11ms, Average = 5ms
""",
    [(None, "desk", B, rtt) for rtt in (11.0, 0.5, None, None)],
)
PING_GERMAN = Sample(
    "ping",
    "ping.txt",
    """\

Ping wird ausgeführt für 198.51.100.1 mit 32 Bytes Daten:
Antwort von 198.51.100.1: Bytes=32 Zeit=14ms TTL=64
Zeitüberschreitung der Anforderung.
Antwort von 198.51.100.1: Bytes=32 Zeit<1ms TTL=64

Ping-Statistik für 198.51.100.1:
    Pakete: Gesendet = 4, Empfangen = 2, Verloren = 2
    (50% Verlust),
""",
    [(None, "localhost", A, rtt) for rtt in (14.0, None, 0.5, None)],
)
FPING_EACH = Sample(
    "fping",
    "192.0.2.10_fping.txt",
    """\
198.51.100.1 : 0.034 0.043 - 0.041
2001:db8::1  : - - - -
""",
    [(None, HERE, A, rtt) for rtt in (0.034, 0.043, None, 0.041)] + [(None, HERE, V6, None)] * 4,
)
FPING_TIMES = Sample(
    "fping",
    "fping.txt",
    """\
[1783449025.44098] 198.51.100.1 : [0], 64 bytes, 9.37 ms (9.37 avg, 0% loss)
[1783449025.54098] one.example.com (203.0.113.9) : [0], timed out (NaN avg, 100% loss)
[1783449026.44098] 198.51.100.1 : [1], 84 bytes, 8.72 ms (9.05 avg, 0% loss)

198.51.100.1 : 9.37 8.72
one.example.com (203.0.113.9) : -
""",
    [
        (1783449025.44098, "localhost", A, 9.37),
        (1783449025.54098, "localhost", B, None),
        (1783449026.44098, "localhost", A, 8.72),
    ],
)
FPING_OLD = Sample(  # before version 5, only answers had lines
    "fping",
    "fping.txt",
    """\
198.51.100.1 : [0], 84 bytes, 0.42 ms (0.42 avg, 0% loss)
198.51.100.1 : [2], 84 bytes, 0.44 ms (0.43 avg, 33% loss)

198.51.100.1 : xmt/rcv/%loss = 3/2/33%, min/avg/max = 0.42/0.43/0.44
203.0.113.9  : xmt/rcv/%loss = 2/0/100%
""",
    [(None, "localhost", A, rtt) for rtt in (0.42, 0.44, None)] + [(None, "localhost", B, None)] * 2,
)
FPING_INTERVALS = Sample(
    "fping",
    "fping.txt",
    """\
2024-05-01T12:00:00+02:00
[12:00:10]
198.51.100.1 : xmt/rcv/%loss = 2/1/50%, min/avg/max = 0.11/0.11/0.11
[12:00:20]
198.51.100.1 : xmt/rcv/%loss = 2/2/0%, min/avg/max = 0.10/0.12/0.14

198.51.100.1 : xmt/rcv/%loss = 4/3/25%, min/avg/max = 0.10/0.12/0.14
""",
    _each(1714557600.0, "localhost", A, 0.11, None, 0.12, 0.12),
)
FPING_ALIVE = Sample(
    "fping",
    "fping.txt",
    """\
198.51.100.1 is alive (10.5 ms)
ICMP Host Unreachable from 192.0.2.254 for ICMP Echo sent to 203.0.113.9
203.0.113.9 is unreachable
""",
    [(None, "localhost", A, 10.5), (None, "localhost", B, None)],
)
MTR_JSON = Sample(
    "mtr",
    "mtr.json",
    """\
{
    "report": {
        "mtr": {
            "src": "ams1",
            "dst": "198.51.100.1",
            "tos": 0,
            "tests": 3,
            "psize": "64",
            "bitpattern": "0x00"
        },
        "hubs": [
            {
                "count": 1,
                "host": "192.0.2.254",
                "Loss%": 0.0,
                "Snt": 3,
                "Last": 0.024,
                "Avg": 0.03,
                "Best": 0.022,
                "Wrst": 0.046,
                "StDev": 0.013
            },
            {
                "count": 2,
                "host": "198.51.100.1",
                "Loss%": 33.333,
                "Snt": 3,
                "Last": 20.1,
                "Avg": 20.5,
                "Best": 20.1,
                "Wrst": 20.9,
                "StDev": 0.4
            }
        ]
    }
}
""",
    [(None, "ams1", A, rtt) for rtt in (20.5, 20.5, None)],
)
MTR_REPORT = Sample(
    "mtr",
    "mtr.txt",
    """\
Start: 2026-11-19T12:43:31+0000
HOST: ams1                        Loss%   Snt   Last   Avg  Best  Wrst StDev
  1.|-- 192.0.2.254                0.0%     2    0.4   0.5   0.4   0.6   0.0
  2.|-- ???                       100.0     2    0.0   0.0   0.0   0.0   0.0
  3. AS64500  198.51.100.1         0.0%     2   12.0  12.5  12.0  13.0   0.0
""",
    _each(1795092211.0, "ams1", A, 12.5, 12.5),
)
MTR_CSV = Sample(
    "mtr",
    "mtr-ams1.csv",
    """\
Mtr_Version,Start_Time,Status,Host,Hop,Ip,Loss%,Snt, ,Last,Avg,Best,Wrst,StDev,
MTR.0.95,1795092228,OK,198.51.100.1,1,192.0.2.254,0.00,2,0,0.04,0.05,0.04,0.05,0.00
MTR.0.95,1795092228,OK,198.51.100.1,2,198.51.100.1,50.00,2,0,7.04,7.05,7.04,7.05,0.00
MTR.0.95,1795092238,OK,203.0.113.9,1,???,100.00,2,0,0.00,0.00,0.00,0.00,0.00
""",
    [*_each(1795092228.0, "ams1", A, 7.05, None), *_each(1795092238.0, "ams1", B, None, None)],
)
PROMETHEUS_BLACKBOX = Sample(
    "prometheus",
    "range.json",
    '{"status":"success","data":{"resultType":"matrix","result":['
    '{"metric":{"__name__":"probe_success","instance":"https://198.51.100.1:443/up","job":"icmp"},'
    '"values":[[1435781430.781,"1"],[1435781445.781,"0"]]},'
    '{"metric":{"__name__":"probe_duration_seconds","instance":"https://198.51.100.1:443/up","job":"icmp"},'
    '"values":[[1435781430.781,"0.0205"],[1435781445.781,"5.0001"],[1435781460.781,"NaN"]]},'
    '{"metric":{"__name__":"probe_icmp_duration_seconds","instance":"203.0.113.9","phase":"rtt","site":"ams1"},'
    '"values":[[1435781430.781,"0.0123"],[1435781445.781,"0"]]},'
    '{"metric":{"__name__":"probe_icmp_duration_seconds","instance":"203.0.113.9","phase":"resolve","site":"ams1"},'
    '"values":[[1435781430.781,"0.0009"]]}]}}',
    [
        (1435781430.781, "localhost", A, 20.5),
        (1435781445.781, "localhost", A, None),
        (1435781430.781, "ams1", B, 12.3),
        (1435781445.781, "ams1", B, None),
    ],
)
_SMOKEPING_LABELS = '"host":"one.example.com","ip":"198.51.100.1","instance":"192.0.2.10:9374","source":""'
PROMETHEUS_SMOKEPING = Sample(
    "prometheus",
    "range.json",
    '{"status":"success","data":{"resultType":"matrix","result":['
    '{"metric":{"__name__":"smokeping_requests_total","host":"other","ip":"198.51.100.1"},'  # another counter
    '"values":[[1714557600,"700"],[1714557615,"900"]]},'
    '{"metric":{"__name__":"smokeping_requests_total",' + _SMOKEPING_LABELS + "},"
    '"values":[[1714557600,"100"],[1714557615,"103"],[1714557630,"2"]]},'
    '{"metric":{"__name__":"smokeping_response_duration_seconds_sum",' + _SMOKEPING_LABELS + "},"
    '"values":[[1714557600,"1.5"],[1714557615,"1.54"],[1714557630,"0.04"]]},'
    '{"metric":{"__name__":"smokeping_response_duration_seconds_count",' + _SMOKEPING_LABELS + "},"
    '"values":[[1714557600,"100"],[1714557615,"102"],[1714557630,"2"]]}]}}',
    _each(1714557615.0, HERE, A, 20.0, 20.0, None),  # the counters were reset after that
)
PROMETHEUS_VECTOR = Sample(
    "prometheus",
    "query-192.0.2.10.json",
    '{"status":"success","data":{"resultType":"vector","result":['
    '{"metric":{"target":"198.51.100.1"},"value":[1714557600.5,"0.015"]}]}}',
    [(1714557600.5, HERE, A, 15.0)],
)
PROMETHEUS_PROMTOOL = Sample(
    "prometheus",
    "promtool.json",
    '[{"metric":{"__name__":"ping_rtt_seconds","instance":"ams1:9427","target":"198.51.100.1","type":"mean"},'
    '"values":[[1714557600,"0.015"]]},'
    '{"metric":{"__name__":"ping_rtt_seconds","instance":"ams1:9427","target":"198.51.100.1","type":"worst"},'
    '"values":[[1714557600,"0.15"]]}]',
    [(1714557600.0, "ams1", A, 15.0)],
)
INFLUX = Sample(
    "influx",
    "telegraf.lp",
    """\
# telegraf --test
ping,host=ams1,url=198.51.100.1 average_response_ms=23.066,maximum_response_ms=24.64,minimum_response_ms=22.451,\
packets_received=1i,packets_transmitted=2i,percent_packet_loss=50,result_code=0i,standard_deviation_ms=0.809 \
1535747258000000000
ping,host=ams\\ 2,url=203.0.113.9 packets_received=0i,packets_transmitted=1i,percent_packet_loss=100,result_code=0i \
1535747259
http_response,host=ams1,method=GET,server=http://198.51.100.1 response_time=0.4,result_code=0i 1535747259000000000
cpu,host=ams1,cpu=cpu0 usage_idle=97.2,note="a, b = c" 1535747259000000000
> ping,host=ams1,url=https://one.example.com/ rtt_ms=7.5 1535747260000
net_response,host=ams1,port=443,protocol=tcp,result=success,server=198.51.100.1 response_time=0.0123,result_code=0i,\
result_type="success",string_found=false 1535747261000000000
""",
    [
        *_each(1535747258.0, "ams1", A, 23.066, None),
        (1535747259.0, "ams 2", B, None),
        (1535747260.0, "ams1", "one.example.com", 7.5),
        (1535747261.0, "ams1", A, 12.3),
    ],
)
GLOBALPING = Sample(
    "globalping",
    "measurement.json",
    """\
{
    "id": "tEaUg3vYnOu2exVC",
    "type": "ping",
    "status": "finished",
    "createdAt": "2022-07-17T16:19:52.909Z",
    "updatedAt": "2022-07-17T16:19:53.969Z",
    "target": "one.example.com",
    "probesCount": 2,
    "results": [
        {
            "probe": {"continent": "AF", "region": "Southern Africa", "country": "ZA", "state": null,
                "city": "Cape Town", "asn": 16509, "longitude": 18.4232, "latitude": -33.9258,
                "network": "amazon.com inc.", "tags": [], "resolvers": ["1.1.1.1", "private"]},
            "result": {
                "status": "finished",
                "rawOutput": "PING one.example.com (198.51.100.1) 56(84) bytes of data.\\n",
                "resolvedAddress": "198.51.100.1",
                "resolvedHostname": "one.example.com",
                "timings": [{"ttl": 108, "rtt": 16.5}, {"ttl": 108, "rtt": 16.6}],
                "stats": {"min": 16.474, "max": 16.6, "avg": 16.504, "total": 3, "loss": 33.33, "rcv": 2, "drop": 1}
            }
        },
        {
            "probe": {"continent": "NA", "country": "CA", "city": "Toronto", "asn": 7794, "network": "Network"},
            "result": {
                "status": "finished",
                "resolvedAddress": "198.51.100.1",
                "resolvedHostname": "198.51.100.1:",
                "timings": [],
                "stats": {"min": 24.891, "max": 28.193, "avg": 27.088, "total": 3, "loss": 0, "rcv": 3, "drop": 0}
            }
        }
    ]
}
""",
    [
        *_each(1658074792.909, "Cape_Town-ZA-AS16509", A, 16.5, 16.6, None),
        *_each(1658074792.909, "Toronto-CA-AS7794", A, 27.088, 27.088, 27.088),
    ],
)
SCAMPER = Sample(
    "scamper",
    "scamper.json",
    '{"type":"cycle-start", "list_name":"default", "id":1, "hostname":"ams1", "start_time":1714557600}\n'
    '{"type":"ping", "version":"0.4", "method":"icmp-echo", "src":"192.0.2.10", "dst":"198.51.100.1", '
    '"start":{"sec":1714557600,"usec":250000}, "ping_sent":3, "probe_size":84, "userid":0, "ttl":64, "wait":1, '
    '"timeout":1, "flags":[], "responses":[{"from":"198.51.100.1", "seq":0, "reply_size":84, "reply_ttl":53, '
    '"reply_proto":"icmp", "tx":{"sec":1714557600, "usec":250000}, "rx":{"sec":1714557600, "usec":280125}, '
    '"rtt":30.125, '
    '"probe_ipid":1, "reply_ipid":2, "icmp_type":0, "icmp_code":0},{"from":"192.0.2.254", "seq":1, "reply_size":56, '
    '"tx":{"sec":1714557601, "usec":250000}, "rtt":1.5, "icmp_type":3, "icmp_code":1},'
    '{"from":"198.51.100.1", "seq":2, "reply_size":84, "tx":{"sec":1714557602, "usec":250000}, "rtt":30.25, '
    '"icmp_type":0, "icmp_code":0}], "statistics":{"replies":2, "loss":1, "min":30.125, "max":30.25, "avg":30.2}}\n'
    '{"type":"cycle-stop", "list_name":"default", "id":1, "hostname":"ams1", "stop_time":1714557603}\n',
    [(1714557600.25, HERE, A, 30.125), (1714557602.25, HERE, A, 30.25), (1714557600.25, HERE, A, None)],
)
SMOKEPING = [
    *_each(1795000200.0, "192.0.2.10", A, 11.0, 12.0, 13.0, 14.0, 15.0),
    *_each(1795000500.0, "192.0.2.10", A, 11.0, 12.0, 14.0, None, None),
    *_each(1795000800.0, "192.0.2.10", A, None, None, None, None, None),
]
RRD_FETCH = Sample(
    "rrd",
    "198.51.100.1~192.0.2.10.txt",
    """\
                         uptime                loss              median               ping1               ping2\
               ping3               ping4               ping5

1794999900: -nan -nan -nan -nan -nan -nan -nan -nan
1795000200: -nan 0.0000000000e+00 1.3000000000e-02 1.1000000000e-02 1.2000000000e-02 1.3000000000e-02\
 1.4000000000e-02 1.5000000000e-02
1795000500: -nan 2.0000000000e+00 1.2000000000e-02 1.1000000000e-02 1.2000000000e-02 1.4000000000e-02 -nan -nan
1795000800: -nan 5.0000000000e+00 -nan -nan -nan -nan -nan -nan
1795001100: -nan -nan -nan -nan -nan -nan -nan -nan
""",
    SMOKEPING,
)


def _dump() -> str:
    """As rrdtool writes it, without the parts that say nothing here."""
    names = ["uptime", "loss", "median", *(f"ping{number}" for number in range(1, 6))]
    rows = {
        1794999900: ["NaN"] * 8,
        1795000200: ["NaN", "0.0", "1.3e-02", "1.1e-02", "1.2e-02", "1.3e-02", "1.4e-02", "1.5e-02"],
        1795000500: ["NaN", "2.0", "1.2e-02", "1.1e-02", "1.2e-02", "1.4e-02", "NaN", "NaN"],
        1795000800: ["NaN", "5.0", *["NaN"] * 6],
    }
    sources = "".join(f"\t<ds>\n\t\t<name> {name} </name>\n\t\t<type> GAUGE </type>\n\t</ds>\n" for name in names)
    archives = ""
    for function, steps in (("AVERAGE", 1), ("AVERAGE", 12), ("MAX", 12)):
        archives += f"\t<rra>\n\t\t<cf>{function}</cf>\n\t\t<pdp_per_row>{steps}</pdp_per_row> <!-- 300 seconds -->\n"
        archives += "\t\t<database>\n"
        for time, values in rows.items():
            cells = "".join(f"<v>{value}</v>" for value in values)
            archives += f"\t\t\t<!-- 2026-11-18 11:10:00 UTC / {time} --> <row>{cells}</row>\n"
        archives += "\t\t</database>\n\t</rra>\n"
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        '<!DOCTYPE rrd SYSTEM "https://oss.oetiker.ch/rrdtool/rrdtool.dtd">\n'
        "<!-- Round Robin Database Dump -->\n<rrd>\n"
        f"\t<version>0003</version>\n\t<step>300</step> <!-- Seconds -->\n{sources}{archives}</rrd>\n"
    )


RRD_DUMP = Sample("rrd", "198.51.100.1~192.0.2.10.xml", _dump(), SMOKEPING)

SAMPLES: Final = {name.lower(): value for name, value in list(globals().items()) if isinstance(value, Sample)}


def smokeping_database(folder: Path) -> Path:
    """A database of SmokePing's layout, with the measurements of `SMOKEPING`, made by rrdtool."""
    path = folder / "198.51.100.1~192.0.2.10.rrd"
    gauges = ["uptime", "loss", "median", *(f"ping{number}" for number in range(1, 6))]
    layout = [*(f"DS:{name}:GAUGE:600:0:180" for name in gauges), "RRA:AVERAGE:0.5:1:1008", "RRA:AVERAGE:0.5:12:4320"]
    updates = [
        "1795000200:U:0:.013:.011:.012:.013:.014:.015",
        "1795000500:U:2:.012:.011:.012:.014:U:U",
        "1795000800:U:5:U:U:U:U:U:U",
    ]
    subprocess.run(["rrdtool", "create", path, "--start", "1794999900", "--step", "300", *layout], check=True)
    subprocess.run(["rrdtool", "update", path, *updates], check=True)
    return path
