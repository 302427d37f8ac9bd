"""Which devices there are, as rows; `detect()` alone asks which one this is."""

from jattn.platforms.detect import detect
from jattn.platforms.platform import Evidence, Platform
from jattn.platforms.table import PLATFORMS, platform_named

__all__ = ["PLATFORMS", "Evidence", "Platform", "detect", "platform_named"]
