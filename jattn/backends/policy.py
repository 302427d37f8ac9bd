"""The record of one backend policy: a name is rules and limits, not a vendor library. Rows are in `table.py`."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackendPolicy:
    """What choosing a backend by name means here: legal page sizes, drafts, dtypes and which kernels it prefers."""

    name: str
    page_sizes: frozenset[int] | None = None  # legal sizes; None: any from 1 to 256
    max_topk: int | None = None  # widest draft tree; None: no limit
    mla_only: bool = False
    supports_mla: bool = True
    supports_mha: bool = True
    sinks: bool = True
    kv_dtypes: frozenset[str] | None = None  # None: every dtype that a kernel provides
    kernel_preference: tuple[str, ...] = ()  # kernel sets tried before the platform's own order
    refused: str | None = None  # why attention cannot run under this name yet (sparse and hybrid policies)
    note: str = ""
