"""Builders of `datasets` for JSON, CSV, Parquet and Arrow files in which a column has one type in all files.

They are subclasses of those of datasets 5.2, for files, folders, Hub datasets and streams: `datasets` decides types by
the first rows, or the first file. Tests: tests/engine/data/test_column_types.py, and tests/engine/data/test_bad_rows.py, which also
notices if `datasets` changes. `datasets` replaces `open` in this module, so that it also opens URLs.
"""

from collections.abc import Sequence
from typing import Any

import datasets
from datasets.packaged_modules.arrow.arrow import Arrow
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.json.json import Json
from datasets.packaged_modules.parquet.parquet import Parquet
from datasets.packaged_modules.text.text import Text

from engine.data import csv_reader, json_reader
from engine.data.column_types import cast_table, join_features
from engine.data.file_columns import features_of_file


class OneType(datasets.ArrowBasedBuilder):
    """Finds the features of a dataset in all its files, unless its card or the caller has named them."""

    format = ""  # as in `features_of_file`
    only_columns: list[str] | None = None  # of a stream: the columns to read; None: all
    late_columns: Sequence[str] = ()  # of a stream: columns that later rows must not bring
    has_card = False  # the features are those of a dataset card

    def has_own_dialect(self) -> bool:
        """Return True if the files are to be read by the reader of `datasets`, as its card says."""
        return False

    def _split_generators(self, dl_manager):
        is_known = self.info.features is not None
        self.has_card = is_known and self.config.features is None
        splits = super()._split_generators(dl_manager)
        if not is_known and not dl_manager.is_streaming and not self.has_own_dialect():
            groups = [split.gen_kwargs.get("files_iterables") or [split.gen_kwargs["files"]] for split in splits]
            files = [file for group in groups for some in group for file in some]
            separator = getattr(self.config, "sep", ",")
            # `datasets` names what is inside a compressed file gzip://…, which its `open` reads
            features = [features_of_file(self.format, file, separator, open) for file in files]
            self.info.features = join_features(features, self.format)
        return splits


class JsonFiles(OneType, Json):
    format = "json"

    def has_own_dialect(self) -> bool:
        return json_reader.has_own_dialect(self.config)

    def _generate_tables(self, base_files, files_iterables, original_files, allow_full_read=True):
        if self.has_own_dialect() or json_reader.has_other_json(self.info.features):
            yield from super()._generate_tables(base_files, files_iterables, original_files, allow_full_read)
        else:
            yield from json_reader.json_tables(self, files_iterables, open)


class CsvFiles(OneType, Csv):
    format = "csv"

    def has_own_dialect(self) -> bool:
        return csv_reader.has_own_dialect(self.config)

    def _generate_tables(self, base_files, files_iterables):
        if self.has_own_dialect():
            yield from super()._generate_tables(base_files, files_iterables)
        else:
            yield from csv_reader.csv_tables(self, files_iterables, open)


class TypedFiles(OneType):
    """Files that hold types: their tables are cast to the features of the dataset."""

    def _cast_table(self, pa_table):
        return pa_table if self.info.features is None else cast_table(pa_table, self.info.features)


class ParquetFiles(TypedFiles, Parquet):
    format = "parquet"


class ArrowFiles(TypedFiles, Arrow):
    format = "arrow"


OWN = {Json: JsonFiles, Csv: CsvFiles, Parquet: ParquetFiles, Arrow: ArrowFiles}


def load_builder(path: str, config_name: str | None = None, **options) -> Any:
    """Return the builder of a dataset, a folder or files: one of this file, unless their format is another.

    Arguments are those of `datasets.load_dataset_builder`."""
    builder = datasets.load_dataset_builder(path, config_name, **options)
    if isinstance(builder, Text) and builder.config.encoding == "utf-8":
        builder.config.encoding = "utf-8-sig"  # without the byte order mark
    own = next((own for theirs, own in OWN.items() if isinstance(builder, theirs)), None)
    if own is None:
        return builder
    config = dict(vars(builder.config))
    return own(
        cache_dir=options.get("cache_dir"),
        dataset_name=builder.dataset_name,
        config_name=config.pop("name"),
        config_id=builder.config_id,
        hash=builder.hash,
        base_path=builder.base_path,
        info=builder.info,
        token=builder.token,
        repo_id=builder.repo_id,
        storage_options=builder.storage_options,
        **config,
    )
