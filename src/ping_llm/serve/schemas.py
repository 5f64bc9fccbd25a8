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
    Field(description="ISO 8601, or Unix seconds. Left out in a question: after all known measurements."),
]
Levels = Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Field(max_length=32, description="Of the quantiles.")]
Bins = Annotated[int, Field(ge=0, le=512, description="Bins of each density, equally wide in ln RTT; 0: no density.")]
QUANTILES = [0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Question(Strict):
    src_addr: AddressText
    dst_addr: AddressText
    event_time: Time = None


class Measurement(Question):
    rtt: Annotated[float | None, Field(description="In ms; null or negative: no answer came.")] = None


class WithHistory(Strict):
    history: Annotated[list[Measurement], Field(description="Known measurements, besides those of the server.")] = []
    use_rows: Annotated[bool, Field(description="Whether the measurements of the server count as known.")] = True


class WithDensity(WithHistory):
    quantiles: Levels = QUANTILES
    bins: Bins = 0


class PredictRequest(WithDensity):
    questions: Annotated[list[Question], Field(min_length=1)]


class ContextRequest(WithDensity):
    question: Question
    sizes: Annotated[
        list[Annotated[int, Field(ge=0, le=100_000)]] | None,
        Field(min_length=1, max_length=32, description="Context sizes to answer from. Left out: a dozen, up to all."),
    ] = None


class Range(Strict):
    begin: Annotated[Time, Field(description="Only measurements from then on.")] = None
    end: Annotated[Time, Field(description="Only measurements until then.")] = None


class MatrixRequest(WithHistory, Range):
    count: Annotated[int, Field(ge=1, le=100, description="Of the busiest sources, and of the destinations.")] = 16


class SuggestRequest(WithHistory):
    budget: Annotated[int, Field(ge=1, le=500, description="How many pairs can be measured.")] = 20


class RankRequest(WithHistory):
    src_addr: AddressText
    dst_addrs: Annotated[list[AddressText], Field(min_length=1)]
    event_time: Time = None
    quantiles: Levels = QUANTILES


class SearchRequest(WithHistory):
    src_addr: AddressText
    rtt: Annotated[float | None, Field(gt=0, le=600_000, description="RTT in ms.", examples=[20.0])] = None
    event_time: Time = None
    count: Annotated[int, Field(ge=1, le=100, description="How many to give back.")] = 10


class DestinationsRequest(SearchRequest):
    candidates: Annotated[
        list[AddressText],
        Field(description="Left out: a language model searches all addresses, a completer those of rows and history."),
    ] = []


class CompleteRequest(SearchRequest):
    prefix: Annotated[str, Field(max_length=60, examples=["193.0."])]


Last = Annotated[int | None, Field(ge=1, description="Score only so many of the latest.")]


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
    added: Annotated[int, Field(description="Measurements. Answers rest on them after the next refresh.")]


class Density(BaseModel):
    edges: Annotated[list[float], Field(description="Edges of the bins in ms, one more than there are bins.")]
    probability: Annotated[list[float], Field(description="Of each bin, given that an answer comes.")]


class Prediction(BaseModel):
    p_failed: Annotated[float, Field(description="Probability that no answer comes.")]
    median: Annotated[float, Field(description="In ms, like all RTTs; given that an answer comes.")]
    quantiles: dict[str, float]
    density: Density | None = None


class Support(BaseModel):
    """What an answer of the completer rests on, of the measurements that it chooses its context from."""

    pair_measurements: Annotated[int, Field(description="Of the two ends, in either direction.")]
    src_measurements: int
    dst_measurements: int
    chain: Annotated[int | None, Field(description="Hops of the shortest chain of measurements between the two.")]
    extrapolating: Annotated[bool, Field(description="Whether the answer is a guess from typical topologies.")]
    reason: Annotated[str | None, Field(description="Why, in words.")]


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
    rtt: Annotated[list[float | None], Field(description="In ms; null: no answer came.")]
    total: Annotated[int, Field(description="How many there are. The columns hold the latest, where that is more.")]


class MeasurementsReply(MeasuredColumns):
    dropped: Annotated[dict[str, int], Field(description="How many are not used, by reason.")]
    reading: Annotated[list[str], Field(description="What the file was taken for, in two lines.")] = []


class Step(Prediction):
    size: Annotated[int, Field(description="Measurements in the context.")]


class ContextReply(BaseModel):
    context: Annotated[MeasuredColumns, Field(description="What the answer is computed from, most informative first.")]
    steps: list[Step]


class RankReply(BaseModel):
    ranking: Annotated[list[PairPrediction], Field(description="By the median of the predicted RTT, shortest first.")]


class Likely(BaseModel):
    dst_addr: str
    probability: float
    median: Annotated[float | None, Field(description="The RTT that is predicted for it.")] = None
    p_failed: float | None = None


class DestinationsReply(BaseModel):
    among: Annotated[
        Literal["all addresses", "candidates"],
        Field(
            description="Probabilities are those of the destinations (language model), or the chance that the RTT is "
            "within 10 % of the given one (completer)."
        ),
    ]
    candidates: Annotated[int | None, Field(description="Number of candidates.")] = None
    covered: Annotated[float | None, Field(description="Probability of all addresses that were searched.")] = None
    destinations: list[Likely]


class MatrixReply(BaseModel):
    sources: list[str]
    destinations: list[str]
    median: Annotated[list[list[float | None]], Field(description="Measured, in ms: a row for each source.")]
    measurements: list[list[int]]
    colours: Annotated[list[str], Field(description="Of a heat map: from the shortest RTT to the longest.")]


class SuggestReply(BaseModel):
    suggestions: Annotated[list[PairPrediction], Field(description="The pair that would say most first.")]
    complete: Annotated[bool, Field(description="False: time ran out, and only a part of all pairs was weighed.")]


class Place(BaseModel):
    address: str
    name: str
    latitude: float
    longitude: float


class PlacesReply(BaseModel):
    places: list[Place]


class AnomaliesReply(MeasurementsReply):
    bits: Annotated[list[float | None], Field(description="Anomaly score: NLL of the result in bits.")]
    expected: Annotated[list[float | None], Field(description="Median that was expected (completer).")]
    low: Annotated[list[float | None], Field(description="Its 10 % quantile.")]
    high: Annotated[list[float | None], Field(description="Its 90 % quantile.")]
    complete: Annotated[bool, Field(description="False: time ran out, and only the latest were scored.")]


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
    examples: Annotated[list[Question], Field(description="Pairs that were measured most.")]


class ModelReply(BaseModel):
    name: str
    kind: Literal["completer", "language model"]
    version: str
    steps: int
    context: Annotated[int, Field(description="Measurements in a full context.")]
    warm: Annotated[bool, Field(description="Whether everything is compiled. Until then some answers take seconds.")]
    limits: Limits
    rows: RowsInfo | None
    places: Annotated[int, Field(description="Nodes whose location is known.")]


class Problem(BaseModel):
    error: Annotated[str, Field(description="One line that says what to do.")]


class Health(BaseModel):
    status: Literal["ok", "warming"]
