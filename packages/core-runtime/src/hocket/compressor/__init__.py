"""In what form values travel: the interface of compressors and core's own."""

from hocket.compressor.api import Compressor, Message
from hocket.compressor.none import NoCompression

__all__ = ["Compressor", "Message", "NoCompression"]
