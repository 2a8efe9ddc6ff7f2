"""Streaming (`streaming: true`): training data is read during training instead of prepared first.

Tests: tests/addons/streaming/.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from addons.streaming import sources
from addons.streaming.stream import Stream
from engine.config.addon import Addon
from engine.config.find_addons import fields_of_addons_with
from engine.config.option import option
from engine.rows.sources import Source
from engine.task import Task


@dataclass(frozen=True)
class Streaming(Addon):
    streaming: bool = option(
        "read training data during training instead of preparing it first; needs max_steps",
        False,
        group="data",
    )
    stream_lanes: int | None = option(
        "shard groups of a stream: the most processes that can read it (default: 8, fewer for small data)",
        min=1,
        is_rare=True,
    )

    knows_all_rows = False

    def errors(self, cfg: Any, training: bool) -> Iterator[str]:
        """Yield the errors of fields that only a stream has, or cannot have."""
        if not self.streaming:
            if training:
                yield "stream_lanes is given without streaming: give both, or neither"
            return
        for name in fields_of_addons_with(cfg, Addon.after_preparation):
            yield f"{name} and streaming are both given, but the rows of a stream are not known in advance: remove one of them"
        if not training:
            return
        if not cfg.max_steps:
            yield "streaming is true: a stream has no length, so give --max_steps"
        if cfg.mixture:
            yield "mixture and streaming are both given, but a mixture needs data of known length: remove one of them"

    def fetch_source(self, source: Source, cfg: Any) -> Source:
        """Look up the files of the training data; download the evaluation data, unless it is a Hub dataset."""
        look_up = sources.look_up_stream if source.split == "train" else sources.fetch_evaluation
        return look_up(source, cfg)

    def open_source(self, cfg: Any, task: Task, source: Source) -> Stream | None:
        """Return the training data as a stream; None: evaluation data are prepared."""
        return Stream(cfg, task, source) if isinstance(source, sources.StreamSource) else None

    def plan_rows(self, cfg: Any, task: Task, train_set: Any, total: int, rows: dict[str, str]) -> dict[str, str]:
        """Return the line of the plan about the length of the run."""
        shards, groups = len(train_set.shards), train_set.shard_groups
        return {"steps": f"{rows['steps']} from a stream of {shards:,} shards in {groups} shard groups"}
