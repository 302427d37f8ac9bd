"""Creating draft backends: plain records that say what runs, under which stamps, with how many steps.

Behaviour, order of checks and error texts: DraftBackendFactory of SGLang 0.5.21. `native`, ours, has no limits.
"""

import dataclasses

from jattn.draft.config import DraftConfig
from jattn.draft.rows import DraftRow, draft_row


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftBackend:
    """A draft backend, or one step of a container. The dispatch reads its stamps instead of the target's names."""

    variant: str  # what it is, as "flashinfer_mla"
    prefill_stamp: str
    decode_stamp: str
    topk: int
    step: int | None = None  # its place in a container; None for a container or a draft-extend backend
    seed_dsa_topk: bool = False
    wrapper: str | None = None  # the model family whose wrapper goes around it
    steps: tuple["DraftBackend", ...] = ()


def create_decode_backend(config: DraftConfig) -> DraftBackend | None:
    """The container of the draft's decode steps, one child a step.

    Returns: None where there is at most one step: level 0 comes from draft-extend, so nothing is decoded.
    Raises: NotImplementedError for an Inkling draft, whose convolution state no container carries, and for a QSA tree;
      ValueError for a name that cannot draft, an MLA-only name on another model, or a tree where only chains exist.

    >>> from jattn.platforms import PLATFORMS
    >>> names = dict(prefill_backend="fa3", decode_backend="flashmla")
    >>> config = DraftConfig(platform=PLATFORMS["cuda-sm90"], use_mla=True, topk=1, num_steps=4, **names)
    >>> made = create_decode_backend(config)
    >>> made.variant, made.decode_stamp, len(made.steps)
    ('flashmla', 'flashmla', 3)
    """
    if config.num_steps <= 1:
        return None
    if config.qsa_profile is not None:
        if config.topk != 1:
            raise NotImplementedError(f"topk={config.topk}: the qsa draft container is a chain, so it needs topk=1")
        return _container(config, variant="qsa", stamp="qsa", num_steps=config.num_steps - 1)
    if config.model_family == "inkling":
        raise NotImplementedError(
            "an Inkling draft keeps convolution state, which a multi-step draft backend does not carry; "
            "use --enable-multi-layer-eagle"
        )
    name = config.decode_name
    row = draft_row(name, config)
    if row is None:
        raise ValueError(f"EAGLE is not supported in decode attention backend {name}")
    _check_mla(config, row, row.variant)
    if row.max_topk is not None and config.topk > row.max_topk:
        raise row.limit_error(
            f"topk={config.topk}: the {row.variant} draft container is a chain, so it needs topk=1; "
            "for a tree draft with native, flashinfer (MHA models), triton or fa3"
        )
    num_steps = config.num_steps - 1 + row.num_extra_steps
    return _container(config, variant=row.variant, stamp=row.stamp, num_steps=num_steps)


def create_draft_extend_backend(config: DraftConfig) -> DraftBackend:
    """The backend with which the draft consumes verified tokens. It has no children, and is made for any num_steps.

    Raises: ValueError for a name that cannot draft, or an MLA-only name on another model.
    """
    if config.qsa_profile is not None:
        return _backend(config, variant="qsa", stamp="qsa")
    name = config.extend_name
    row = draft_row(name, config)
    if row is None:
        raise ValueError(f"EAGLE is not supported in attention backend {name}")
    variant, stamp = row.extend_variant or row.variant, row.extend_stamp or row.stamp
    _check_mla(config, row, variant)
    # A wrapper takes over the stamps of what it wraps, so that one record serves for both.
    return _backend(config, variant=variant, stamp=stamp, wrapper=config.model_family)


def _check_mla(config: DraftConfig, row: DraftRow, variant: str) -> None:
    if row.requires_mla and not config.use_mla:
        raise ValueError(f"{variant} backend requires MLA model (use_mla_backend=True).")


def _container(config: DraftConfig, *, variant: str, stamp: str, num_steps: int) -> DraftBackend:
    whole = _backend(config, variant=variant, stamp=stamp)
    steps = tuple(dataclasses.replace(whole, step=step) for step in range(num_steps))
    wrapper = config.model_family if config.model_family == "dots" and variant != "qsa" else None
    return dataclasses.replace(whole, steps=steps, wrapper=wrapper)


def _backend(config: DraftConfig, *, variant: str, stamp: str, wrapper: str | None = None) -> DraftBackend:
    return DraftBackend(
        variant=variant,
        prefill_stamp=stamp,
        decode_stamp=stamp,
        topk=config.topk,
        seed_dsa_topk=config.seed_dsa_topk and variant == "dsa",
        wrapper=wrapper,
    )
