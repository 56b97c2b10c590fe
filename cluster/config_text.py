"""The YAML of a deploy file: plain data alone, and each key once.

YAML itself lets the last of two equal keys win, so that a section written twice would lose its
first half without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from cluster.errors import ConfigError

if TYPE_CHECKING:
    from yaml.nodes import MappingNode


def parse(text: str) -> Any:
    """Return what a text says; raises YAMLError, and ConfigError where a key stands twice."""
    loader = _EachKeyOnce(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


class _EachKeyOnce(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise ConfigError(
                    f"line {line}: {key.value} stands here again, first in line {lines[name]}",
                    field=key.value,
                )
            lines[name] = line
        return node
