"""Where documents come from: ``data.source``."""

from __future__ import annotations

from pathlib import Path

from dsaccum.config.errors import ConfigError
from dsaccum.config.experiment import DataConfig
from dsaccum.data.documents import Documents
from dsaccum.data.functions import function_documents
from dsaccum.data.hub_datasets import dataset_documents, file_documents
from dsaccum.data.standard_library import standard_library_documents


def load_documents(config: DataConfig, source_file: str | Path) -> Documents:
    """Read every document of ``data.source``, in an order that is the same on every rank and in every run.

    Args:
        config: the experiment's ``data`` section.
        source_file: the experiment's file, for messages.

    Raises:
        ConfigError: the source can't be read, or holds no text.
    """
    if config.source == "files":
        documents = file_documents(config, source_file)
    elif config.source == "dataset":
        documents = dataset_documents(config, source_file)
    elif config.source == "python-functions":
        documents = function_documents()
    else:
        documents = standard_library_documents()
    if not any(document.target for document in documents.items):
        key = {"files": "data.files", "dataset": "data.dataset"}.get(config.source, "data.source")
        value = {"files": config.files, "dataset": config.dataset}.get(config.source, config.source)
        raise ConfigError("holds no text", source=source_file, key=key, value=value, fix="name another source of text")
    return documents
