"""Every error that the data plane raises on purpose, beside those of `hetstream.base.errors`.

HetstreamError
├── PipelineError            the user's dataset or functions cannot be streamed
│   ├── SourceError          a file of a dataset is missing, damaged or of another form
│   ├── FeatureError         a feature graph that cannot work, or a batch that does not fit it
│   └── StateError           a state_dict that belongs to another dataset, or is damaged
├── JobNameConflict          one job name, two different pipelines
├── ServiceError             the dispatcher or its address file
│   ├── ServiceUnavailable   nothing answered in time
│   ├── AddressInUse         another process has the port
│   ├── ServiceEnded         the service came to its end before this process was part of it
│   ├── AuthenticationError  the key is not this service's key
│   └── Superseded           another process took this rank's place
├── EmbeddingError           embedding servers that did not come, refused, or cannot be reached
├── ProtocolError            bytes that are no message of this protocol version
├── RemoteError              a data worker's exception that cannot have its own type here; also a RuntimeError
└── DataWorkerDied           a sample ended data worker processes, or made them hang; also a RuntimeError
"""

from __future__ import annotations

from hetstream.base.errors import HetstreamError
from hetstream.base.text import printable

__all__ = [
    "AddressInUse",
    "AuthenticationError",
    "DataWorkerDied",
    "EmbeddingError",
    "FeatureError",
    "JobNameConflict",
    "PipelineError",
    "ProtocolError",
    "RemoteError",
    "ServiceEnded",
    "ServiceError",
    "ServiceUnavailable",
    "SourceError",
    "StateError",
    "Superseded",
]


class PipelineError(HetstreamError):
    """The dataset, sampler or a function of the user cannot be streamed."""


class SourceError(PipelineError):
    """A file that a dataset reads is missing, damaged or of another form.

    Attributes:
        row: of the samples that were asked for at once, where one of them alone is at fault; else -1.
    """

    def __init__(self, text: str = "", row: int = -1) -> None:
        super().__init__(text)
        self.row = row

    @classmethod
    def of(cls, path: object, text: str, row: int = -1) -> SourceError:
        """Of a file: its name, and those in it, may hold newlines and escape sequences."""
        return cls(printable(f"{path}: {text}"), row)


class FeatureError(PipelineError):
    """A feature graph cannot work, or a batch does not fit it; the message names the features.

    Attributes:
        row: of the batch, where one row is at fault; else -1.
        num_rows: of the batch, then.
    """

    def __init__(self, text: str = "", row: int = -1, num_rows: int = 0) -> None:
        super().__init__(text)
        self.row, self.num_rows = row, num_rows


class StateError(PipelineError):
    """A `state_dict` that belongs to another dataset or another order, or is damaged."""


class JobNameConflict(HetstreamError):
    """Two programs use one job name with different pipelines."""


class ServiceError(HetstreamError):
    """The dispatcher or its address file is not usable."""


class ServiceUnavailable(ServiceError):
    """Nothing answered within the deadline."""


class AddressInUse(ServiceError):
    """Another process listens at the port."""


class ServiceEnded(ServiceError):
    """The service ended while this process was not connected to it."""


class AuthenticationError(ServiceError):
    """The peer does not hold this job's key."""


class Superseded(ServiceError):
    """Another process registered with this job name and rank; this one must stop."""


class ProtocolError(HetstreamError):
    """Bytes that are not a message of this protocol version."""


class RemoteError(HetstreamError, RuntimeError):
    """An exception of a data worker whose type cannot be rebuilt here. torch raises RuntimeError for the like."""


class DataWorkerDied(HetstreamError, RuntimeError):
    """A sample ended the data worker processes that tried it, or hung. torch raises RuntimeError for the like."""


class EmbeddingError(HetstreamError):
    """Embedding servers did not come, refused something, or cannot be reached; or a table is used as it cannot be."""
