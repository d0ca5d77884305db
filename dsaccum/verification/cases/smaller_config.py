"""A transformers config with fewer layers, or narrower: the same architecture, hence the same code, and less work.

Fields go by transformers' common names; ``attribute_map`` says what an architecture calls them. What an architecture
has under a name that is not listed here keeps its size, and whether the result still builds is for the caller to try.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

FEWEST_LAYERS: Final = 2
_MOST_HEADS: Final = 4
_HEAD_SIZES: Final = (64, 32, 16, 8)
_NARROWEST: Final = 32
_UNIT: Final = 8  # sizes stay multiples of it: rotary positions want even head sizes, also where they turn a part only

_SCALED_WITH_WIDTH: Final = (
    "intermediate_size",
    "intermediate_size_mlp",
    "n_inner",
    "ffn_dim",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "attention_hidden_size",
    "word_embed_proj_dim",
    "q_lora_rank",
    "kv_lora_rank",
)
_SCALED_WITH_HEAD: Final = ("head_dim", "rotary_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_KEY_VALUE_HEADS: Final = ("num_key_value_heads", "num_kv_heads")
_DENSE_LAYERS: Final = "first_k_dense_replace"


def fewer_layers(config: Any) -> dict[str, Any]:
    """Overrides for two layers, or as many as there are kinds of layers; nothing where there are no more."""
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return {}
    lists = {name: value for name, value in config.to_dict().items() if _is_per_layer(value, layers)}
    kept = _one_of_each_kind(lists, layers)
    if len(kept) == layers:
        return {}
    overrides: dict[str, Any] = {
        name: [values[index] for index in kept] for name, values in lists.items() if _repeats(values)
    }
    dense = getattr(config, _DENSE_LAYERS, None)
    if isinstance(dense, int) and dense >= len(kept):
        overrides[_DENSE_LAYERS] = len(kept) - 1  # the layers with experts come after these
    return {own_name(config, "num_hidden_layers"): len(kept), **overrides}


def widths(config: Any) -> list[int]:
    """Widths to choose from, each smaller than the config's own, widest first."""
    width = getattr(config, "hidden_size", None)
    if not isinstance(width, int):
        return []
    return [head * _heads(config) for head in _HEAD_SIZES if _NARROWEST <= head * _heads(config) < width]


def narrower(config: Any, width: int) -> dict[str, Any]:
    """Overrides for another width, at most four heads, and everything else in proportion."""
    known, old_width = config.to_dict(), config.hidden_size
    overrides: dict[str, int | None] = {"hidden_size": width}
    for name in _SCALED_WITH_WIDTH:
        overrides[name] = _scaled(getattr(config, name, None), width, old_width)
    old_heads = getattr(config, "num_attention_heads", None)
    if isinstance(old_heads, int):
        heads = _heads(config)
        overrides["num_attention_heads"] = heads
        for name in _SCALED_WITH_HEAD:
            # Rounded up: heads that are wider together than the stream stay so, also in the narrowest copy.
            overrides[name] = _scaled(
                getattr(config, name, None), width * old_heads, old_width * heads, rounded=math.ceil
            )
        for name in _KEY_VALUE_HEADS:
            shared = getattr(config, name, None)
            overrides[name] = max(1, heads * shared // old_heads) if isinstance(shared, int) else None
    named = {own_name(config, name): value for name, value in overrides.items() if value is not None}
    return {name: value for name, value in named.items() if name in known}


def own_name(config: Any, name: str) -> str:
    """What the architecture itself calls a field."""
    return config.attribute_map.get(name, name)


def _heads(config: Any) -> int:
    heads = getattr(config, "num_attention_heads", None)
    return min(_MOST_HEADS, heads) if isinstance(heads, int) else _MOST_HEADS


def _scaled(size: Any, new: int, old: int, rounded: Callable[[float], int] = round) -> int | None:
    if not isinstance(size, int) or isinstance(size, bool):
        return None
    return max(_UNIT, rounded(size * new / old / _UNIT) * _UNIT)


def _is_per_layer(value: Any, layers: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == layers


def _repeats(values: list[Any]) -> bool:
    """Says of each layer what it is; a list without repetition is one of layers' numbers."""
    return len({str(value) for value in values}) < len(values)


def _one_of_each_kind(lists: dict[str, list[Any]], layers: int) -> list[int]:
    """The first layer of each kind, and the first ones of all until there are two."""
    kinds = [tuple(str(values[index]) for values in lists.values() if _repeats(values)) for index in range(layers)]
    firsts = {kinds.index(kind) for kind in kinds}
    others = [index for index in range(layers) if index not in firsts]
    return sorted([*firsts, *others[: max(0, FEWEST_LAYERS - len(firsts))]])
