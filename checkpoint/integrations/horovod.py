"""`FlashCheckpointer(..., ranks=HorovodCommunicator())`, for programs that name what is found without it, too."""

from hetstream.checkpoint.flash.ranks import HorovodCommunicator

__all__ = ["HorovodCommunicator"]
