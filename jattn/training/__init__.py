"""Training of draft heads, with optax."""

from jattn.training.accepted import mean_accepted
from jattn.training.step import Progress, Trainer
from jattn.training.texts import Packed, Texts
from jattn.training.unroll import Batch, Losses, unrolled_loss
from jattn.training.write import Writer

__all__ = ["Batch", "Losses", "Packed", "Progress", "Texts", "Trainer", "Writer", "mean_accepted", "unrolled_loss"]
