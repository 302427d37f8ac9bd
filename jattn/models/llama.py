"""The decoder under the name of its first family, for callers that import it from here."""

from jattn.models.decoder import Decoder as Llama

__all__ = ["Llama"]
