"""The one exception a user is meant to see: the command line prints its message as a single line and exits non-zero."""


class PingLlmError(Exception):
    """Something is wrong with what the user gave us (a file, an option, a folder), and the message says what to do."""


class MeasurementError(PingLlmError):
    """Input that cannot be used: one measurement, met under `--strict` (the message names the file and row), or all."""


def one_line(error: BaseException, limit: int = 200) -> str:
    """What an exception of another package says, as it may stand in a message of ours."""
    return " ".join(str(error).split())[:limit] or type(error).__name__
