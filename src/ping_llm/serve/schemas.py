"""The JSON API's requests and replies. Columns have the names that measurement files have."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ping_llm.serve.access import Limits

AddressText = Annotated[
    str,
    Field(
        min_length=1,
        max_length=255,
        description="IPv4 or IPv6 address, or a name that measurements have.",
        json_schema_extra={"format": "node"},
    ),
]
Time = Annotated[
    Annotated[str, Field(max_length=60)] | float | None,
    Field(description="ISO 8601, or Unix seconds. A question without it comes after all known measurements."),
]
Levels = Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Field(max_length=32, description="Quantile levels.")]
Bins = Annotated[int, Field(ge=0, le=512, description="Bins of each density, equally wide in ln RTT; 0: no density.")]
QUANTILES = [0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Question(Strict):
    src_addr: AddressText
    dst_addr: AddressText
    event_time: Time = None


class Measurement(Question):
    rtt: Annotated[float | None, Field(description="In ms; null or negative: a timeout.")] = None


class WithHistory(Strict):
    history: Annotated[list[Measurement], Field(description="Known measurements, in addition to the server's.")] = []
    use_rows: Annotated[bool, Field(description="Whether to use the server's measurements.")] = True


class WithDensity(WithHistory):
    quantiles: Levels = QUANTILES
    bins: Bins = 0


class PredictRequest(WithDensity):
    questions: Annotated[list[Question], Field(min_length=1)]


class ContextRequest(WithDensity):
    question: Question
    sizes: Annotated[
        list[Annotated[int, Field(ge=0, le=100_000)]] | None,
        Field(
            min_length=1,
            max_length=32,
            description="By default about a dozen, up to all measurements.",
        ),
    ] = None


class Range(Strict):
    begin: Annotated[Time, Field(description="Only measurements from this time on.")] = None
    end: Annotated[Time, Field(description="Only measurements up to this time.")] = None


class MatrixRequest(WithHistory, Range):
    count: Annotated[int, Field(ge=1, le=100, description="Number of sources and of destinations, busiest first.")] = 16


class SuggestRequest(WithHistory):
    budget: Annotated[int, Field(ge=1, le=500, description="How many pairs you can measure.")] = 20


class RankRequest(WithHistory):
    src_addr: AddressText
    dst_addrs: Annotated[list[AddressText], Field(min_length=1)]
    event_time: Time = None
    quantiles: Levels = QUANTILES


class SearchRequest(WithHistory):
    src_addr: AddressText
    rtt: Annotated[float | None, Field(gt=0, le=600_000, description="RTT in ms.", examples=[20.0])] = None
    event_time: Time = None
    count: Annotated[int, Field(ge=1, le=100, description="Number of destinations in the reply.")] = 10


class DestinationsRequest(SearchRequest):
    candidates: Annotated[
        list[AddressText],
        Field(description="By default, a language model searches all addresses, a completer those that were measured."),
    ] = []


class CompleteRequest(SearchRequest):
    prefix: Annotated[str, Field(max_length=60, examples=["193.0."])]


Last = Annotated[int | None, Field(ge=1, description="Score only this many of the latest.")]


class AnomaliesRequest(Strict):
    measurements: Annotated[list[Measurement], Field(min_length=1)]
    last: Last = None


class RowsAnomaliesRequest(Range):
    src_addr: AddressText | None = None
    dst_addr: AddressText | None = None
    last: Last = None


class AddedRequest(Strict):
    measurements: Annotated[list[Measurement], Field(min_length=1)]


class AddedReply(BaseModel):
    added: Annotated[int, Field(description="Number of measurements. They are used from the next refresh on.")]


class Density(BaseModel):
    edges: Annotated[list[float], Field(description="Edges of the bins in ms, one more than there are bins.")]
    probability: Annotated[list[float], Field(description="Probability of each bin, given an answer.")]


class Prediction(BaseModel):
    p_failed: Annotated[float, Field(description="Probability of a timeout.")]
    median: Annotated[float, Field(description="In ms, like all RTTs; given an answer.")]
    quantiles: dict[str, float]
    density: Density | None = None


class Support(BaseModel):
    """The measurements that a prediction of the completer is based on."""

    pair_measurements: Annotated[int, Field(description="Of the pair, in either direction.")]
    src_measurements: int
    dst_measurements: int
    chain: Annotated[int | None, Field(description="Hops of the shortest chain of measurements between the two.")]
    distance_km: Annotated[float | None, Field(description="Between the two, if the positions of both are known.")]
    extrapolating: Annotated[bool, Field(description="Whether the prediction extrapolates from typical topologies.")]
    reason: Annotated[str | None, Field(description="Why it extrapolates.")]


class PairPrediction(Prediction):
    src_addr: str
    dst_addr: str
    event_time: float | None
    support: Support | None = None


class PredictReply(BaseModel):
    predictions: list[PairPrediction]


class MeasuredColumns(BaseModel):
    """Measurements as columns of one length."""

    src_addr: list[str]
    dst_addr: list[str]
    event_time: Annotated[list[float | None], Field(description="Unix seconds.")]
    rtt: Annotated[list[float | None], Field(description="In ms; null: a timeout.")]
    total: Annotated[int, Field(description="Number of all such measurements; the columns may hold only the latest.")]


class MeasurementsReply(MeasuredColumns):
    dropped: Annotated[dict[str, int], Field(description="Number of unusable measurements, by reason.")]
    reading: Annotated[list[str], Field(description="How the file was read, in two lines.")] = []


class Step(Prediction):
    size: Annotated[int, Field(description="Measurements in the context.")]


class ContextReply(BaseModel):
    context: Annotated[MeasuredColumns, Field(description="The measurements of the context, most informative first.")]
    steps: list[Step]


class RankReply(BaseModel):
    ranking: Annotated[list[PairPrediction], Field(description="By the median of the predicted RTT, shortest first.")]


class Likely(BaseModel):
    dst_addr: str
    probability: float
    median: Annotated[float | None, Field(description="Median of its predicted RTT.")] = None
    p_failed: float | None = None


class DestinationsReply(BaseModel):
    among: Annotated[
        Literal["all addresses", "candidates"],
        Field(
            description="Probabilities are of the destinations (language model), or that the RTT is within 10 % of the "
            "given one (completer)."
        ),
    ]
    candidates: Annotated[int | None, Field(description="Number of candidates.")] = None
    covered: Annotated[float | None, Field(description="Total probability of the addresses that were searched.")] = None
    destinations: list[Likely]


class MatrixReply(BaseModel):
    sources: list[str]
    destinations: list[str]
    median: Annotated[list[list[float | None]], Field(description="Measured RTTs in ms: a row for each source.")]
    measurements: list[list[int]]
    colours: Annotated[list[str], Field(description="Colours of a heat map, from the shortest RTT to the longest.")]


class SuggestReply(BaseModel):
    suggestions: Annotated[list[PairPrediction], Field(description="The most informative pair first.")]
    complete: Annotated[bool, Field(description="False: time ran out before all candidates were predicted.")]


class Place(BaseModel):
    address: str
    name: str
    latitude: float
    longitude: float


class PlacesReply(BaseModel):
    places: list[Place]


class AnomaliesReply(MeasurementsReply):
    bits: Annotated[list[float | None], Field(description="Anomaly score: NLL of the result in bits.")]
    expected: Annotated[list[float | None], Field(description="Median of the prediction (completer).")]
    low: Annotated[list[float | None], Field(description="Its 10 % quantile.")]
    high: Annotated[list[float | None], Field(description="Its 90 % quantile.")]
    complete: Annotated[bool, Field(description="False: time ran out before all were scored.")]


class KnownAddress(BaseModel):
    address: str
    measurements: int


class AddressesReply(BaseModel):
    addresses: list[KnownAddress]


class RowsInfo(BaseModel):
    measurements: int
    sources: int
    destinations: int
    begin: float | None
    end: float | None
    examples: Annotated[list[Question], Field(description="Pairs with many measurements.")]


class ModelReply(BaseModel):
    name: str
    kind: Literal["completer", "language model"]
    version: str
    steps: int
    context: Annotated[int, Field(description="Measurements in a full context.")]
    warm: Annotated[bool, Field(description="Whether all shapes are compiled; until then some answers take seconds.")]
    limits: Limits
    rows: RowsInfo | None
    places: Annotated[int, Field(description="Nodes whose location is known.")]


class Problem(BaseModel):
    error: Annotated[str, Field(description="One line that says what to do.")]


class Health(BaseModel):
    status: Literal["ok", "warming"]
