"""The record of one backend policy: a name is rules and limits, not a vendor library. Rows are in `table.py`."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackendPolicy:
    """What choosing a backend by name means here: legal page sizes, drafts, dtypes and which kernels it prefers."""

    name: str
    page_sizes: frozenset[int] | None = None  # legal sizes; None: any from 1 to 256
    max_topk: int | None = None  # widest draft tree; None: no limit
    max_mla_topk: int | None = None  # the same for MLA models, where it is narrower
    paged_trees: bool = False  # topk > 1 together with page_size > 1
    mla_page_sizes: frozenset[int] | None = None  # legal sizes for MLA models, where they differ
    mla_only: bool = False
    supports_mla: bool = True
    supports_mha: bool = True
    sinks: bool = True
    kv_dtypes: frozenset[str] | None = None  # None: every dtype that a kernel provides
    kernel_preference: tuple[str, ...] = ()  # kernel sets tried before the platform's own order
    refused: str | None = None  # why attention cannot run under this name yet (sparse and hybrid policies)
    note: str = ""

    def legal_page_sizes(self, *, is_mla: bool) -> frozenset[int] | None:
        """Page sizes that the policy allows for the kind of model; None: any from 1 to 256."""
        return self.mla_page_sizes if is_mla and self.mla_page_sizes is not None else self.page_sizes

    def legal_topk(self, *, is_mla: bool) -> int | None:
        """Widest draft tree for the kind of model; None: no limit."""
        return self.max_mla_topk if is_mla and self.max_mla_topk is not None else self.max_topk
