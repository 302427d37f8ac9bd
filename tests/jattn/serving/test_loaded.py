"""What a run says of itself."""

import subprocess
import sys

import numpy as np

from jattn.serving.loaded import peak_rss_bytes


def test_peak_memory_is_this_process_alone_not_what_its_parent_held():
    ballast = np.ones(100_000_000)  # 800 MB, touched
    code = "from jattn.serving.loaded import peak_rss_bytes; print(peak_rss_bytes())"
    child = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert peak_rss_bytes() > ballast.nbytes
    assert 2**24 < child < ballast.nbytes
