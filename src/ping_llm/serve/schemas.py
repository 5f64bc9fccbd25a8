"""The JSON API's requests and replies. Columns have the names that measurement files have."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

AddressText = Annotated[
    str,
    Field(
        min_length=1,
        max_length=60,
        description="IPv4 or IPv6 address.",
        examples=["192.0.2.1"],
        json_schema_extra={"format": "ip"},
    ),
]
Time = Annotated[
    Annotated[str, Field(max_length=60)] | float | None,
    Field(description="ISO 8601, or Unix seconds. Left out in a question: after everything that is known."),
]
Rtt = Annotated[float | None, Field(gt=0, le=600_000, description="RTT in ms.", examples=[20.0])]
Levels = Annotated[
    list[Annotated[float, Field(gt=0, lt=1)]], Field(max_length=32, description="Levels of the quantiles.")
]
Bins = Annotated[
    int, Field(ge=0, le=512, description="Bins of the density in each reply, equally wide in ln RTT; 0: none.")
]
Count = Annotated[int, Field(ge=1, le=100, description="How many to give back.")]
QUANTILES = [0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Measurement(Strict):
    src_addr: AddressText
    dst_addr: AddressText
    event_time: Time = None
    rtt: Annotated[float | None, Field(description="In ms; null or negative: it failed.")] = None


class Question(Strict):
    src_addr: AddressText
    dst_addr: AddressText
    event_time: Time = None


class WithHistory(Strict):
    history: Annotated[list[Measurement], Field(description="Known measurements, besides those of the server.")] = []
    use_rows: Annotated[bool, Field(description="Whether the measurements that the server knows count as known.")] = (
        True
    )


class PredictRequest(WithHistory):
    questions: Annotated[list[Question], Field(min_length=1)]
    quantiles: Levels = QUANTILES
    bins: Bins = 0


class ContextRequest(WithHistory):
    question: Question
    sizes: Annotated[
        list[Annotated[int, Field(ge=0, le=100_000)]] | None,
        Field(
            min_length=1,
            max_length=32,
            description="Numbers of measurements to answer from. Left out: a dozen, up to all.",
        ),
    ] = None
    quantiles: Levels = QUANTILES
    bins: Bins = 0


class RankRequest(WithHistory):
    src_addr: AddressText
    dst_addrs: Annotated[list[AddressText], Field(min_length=1)]
    event_time: Time = None
    quantiles: Levels = QUANTILES


class DestinationsRequest(WithHistory):
    src_addr: AddressText
    rtt: Rtt = None
    candidates: Annotated[
        list[AddressText],
        Field(description="Among which to look. Left out: a language model looks at all addresses, a completer at "
                          "those of the rows and of the history."),
    ] = []  # fmt: skip
    event_time: Time = None
    count: Count = 10


class CompleteRequest(WithHistory):
    src_addr: AddressText
    prefix: Annotated[str, Field(max_length=60, examples=["193.0."])]
    rtt: Rtt = None
    event_time: Time = None
    count: Count = 10


class SurpriseRequest(Strict):
    measurements: Annotated[list[Measurement], Field(min_length=1)]
    last: Annotated[int | None, Field(ge=1, description="Score only so many of the latest.")] = None


class Density(BaseModel):
    edges: Annotated[list[float], Field(description="Edges of the bins in ms, one more than there are bins.")]
    probability: Annotated[list[float], Field(description="Of each bin, given that the measurement does not fail.")]


class Prediction(BaseModel):
    p_failed: float
    median: Annotated[float, Field(description="In ms, like all RTTs; given that the measurement does not fail.")]
    quantiles: dict[str, float]
    density: Density | None = None


class PairPrediction(Prediction):
    src_addr: str
    dst_addr: str
    event_time: float | None


class PredictReply(BaseModel):
    predictions: list[PairPrediction]


class Measured(BaseModel):
    """Measurements as columns of one length."""

    src_addr: list[str]
    dst_addr: list[str]
    event_time: Annotated[list[float | None], Field(description="Unix seconds.")]
    rtt: Annotated[list[float | None], Field(description="In ms; null: it failed.")]
    total: Annotated[int, Field(description="How many there are. The columns hold the latest, where that is more.")]


class MeasurementsReply(Measured):
    dropped: Annotated[dict[str, int], Field(description="How many could not be used, by reason.")]


class Step(Prediction):
    size: Annotated[int, Field(description="How many measurements this was answered from.")]


class ContextReply(BaseModel):
    context: Annotated[Measured, Field(description="What the answer is drawn from, most telling first.")]
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
        Field(description="Whether probabilities are of destinations (language model), or the chance that the RTT is "
                          "within 10 % of the wanted one (completer)."),
    ]  # fmt: skip
    looked_at: Annotated[int | None, Field(description="Number of candidates.")] = None
    covered: Annotated[float | None, Field(description="Probability of all addresses that were looked at.")] = None
    destinations: list[Likely]


class SurpriseReply(Measured):
    bits: Annotated[list[float | None], Field(description="The less likely a result was, the more.")]
    complete: Annotated[bool, Field(description="False: time ran out, and only the latest were scored.")]
    dropped: dict[str, int]


class FoundAddress(BaseModel):
    address: str
    measurements: int


class AddressesReply(BaseModel):
    addresses: list[FoundAddress]


class RowsInfo(BaseModel):
    measurements: int
    sources: int
    destinations: int
    begin: float | None
    end: float | None
    examples: Annotated[list[Question], Field(description="Pairs that were measured most.")]


class LimitsInfo(BaseModel):
    body_bytes: int
    history: int
    questions: int
    scored: int
    seconds: float


class ModelReply(BaseModel):
    name: str
    kind: Literal["completer", "language model"]
    version: str
    steps: int
    context: Annotated[int, Field(description="Measurements that an answer can be drawn from.")]
    warm: Annotated[bool, Field(description="Whether everything is compiled. Until then some answers take seconds.")]
    limits: LimitsInfo
    rows: RowsInfo | None


class Problem(BaseModel):
    error: Annotated[str, Field(description="One line that says what to do.")]


class Health(BaseModel):
    status: Literal["ok", "warming"]
