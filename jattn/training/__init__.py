"""Training of draft heads."""

from jattn.training.unroll import Batch, Losses, unrolled_loss

__all__ = ["Batch", "Losses", "unrolled_loss"]
