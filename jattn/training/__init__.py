"""Training of draft heads, with optax."""

from jattn.training.step import Progress, Trainer
from jattn.training.texts import Texts
from jattn.training.unroll import Batch, Losses, unrolled_loss

__all__ = ["Batch", "Losses", "Progress", "Texts", "Trainer", "unrolled_loss"]
