"""Where the model of a document is here: the path that was given, or a download of its source.

``kerf download`` does the same on its own; the init container of pods and Jobs runs it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kerf_runtime.cli.options import document_options, json_option
from kerf_runtime.cli.output import echo_json, human_bytes
from kerf_runtime.cli.result import result_file_option, written_result
from kerf_runtime.errors import ConfigError

if TYPE_CHECKING:
    from kerf_runtime.config import ModelDeploymentDocument
    from kerf_runtime.models.download import Downloaded, Transfer

__all__ = ["MODEL_DIR_VARIABLE", "default_model_dir", "download_command", "find_model"]

MODEL_DIR_VARIABLE = "KERF_MODEL_DIR"


def default_model_dir() -> Path:
    """``$KERF_MODEL_DIR``, else ``models`` in Kerf's folder of the user's cache."""
    from kerf_runtime.cli.options import default_cache_dir

    given = os.environ.get(MODEL_DIR_VARIABLE)
    return Path(given) if given else default_cache_dir() / "models"


def find_model(
    document: ModelDeploymentDocument, model_path: Path | None, *, as_json: bool
) -> Path:
    """Folder or GGUF file of the model of ``document``; downloads it if no path was given.

    Raises:
        ConfigError: no path, and the document names a volume, which only a cluster can mount.
        SourceError, DownloadError: as ``models.download.download``.
    """
    if model_path is not None:
        return model_path
    if not document.spec.model.source.is_downloaded:
        raise ConfigError(
            "no model was given: outside a cluster the volume that the document names is not mounted",
            where="--model-path",
            hint="Pass --model-path with the folder or GGUF file that the volume holds",
        )
    return _download(document, default_model_dir(), as_json=as_json).path


@click.command("download")
@document_options
@click.option(
    "--model-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of all downloads. Default: $KERF_MODEL_DIR, or models in Kerf's cache folder.",
)
@result_file_option
@json_option
def download_command(
    file: Path | None,
    overrides: tuple[str, ...],
    model_dir: Path | None,
    result_file: Path | None,
    as_json: bool,
) -> None:
    """Download the model of a document and verify it; what is here already is kept.

    A download that was interrupted is taken up where it ended.
    """
    from kerf_runtime.cli.document import read_document

    with written_result(result_file) as result:
        document = read_document(file, overrides)
        if not document.spec.model.source.is_downloaded:
            raise ConfigError(
                "there is nothing to download: the document names a volume",
                where="model.source",
                hint="Use source huggingFace or s3",
            )
        found = _download(document, model_dir or default_model_dir(), as_json=as_json)
        result.update(
            path=str(found.path),
            source=found.source,
            revision=found.revision,
            sizeBytes=found.size,
            receivedBytes=found.received,
            warning=found.warning,
        )
    if as_json:
        echo_json({"event": "done", **result})
    else:
        click.echo(
            f"{found.path}: {human_bytes(found.size)} of {found.source}, "
            f"{human_bytes(found.received)} downloaded now"
        )


def _download(document: ModelDeploymentDocument, root: Path, *, as_json: bool) -> Downloaded:
    from kerf_runtime.cli.progress import open_progress
    from kerf_runtime.models.download import download

    source = document.spec.model.source
    assert source.download is not None  # both callers made sure
    with open_progress(as_json=as_json) as progress:
        progress("download", source.download.address, None)

        def show(transfer: Transfer) -> None:
            fraction = transfer.done / transfer.total if transfer.total else None
            progress("download", _describe(transfer), fraction)

        found = download(source, root, progress=show)
        progress.finish()
    if found.warning is not None:
        click.echo(
            f"kerf: {found.source} was not asked ({found.warning}); using what was downloaded before",
            err=True,
        )
    return found


def _describe(transfer: Transfer) -> str:
    rate = transfer.received / transfer.seconds if transfer.seconds > 0 else 0.0
    return (
        f"{human_bytes(transfer.done)} of {human_bytes(transfer.total)}, "
        f"{transfer.files} files, {human_bytes(round(rate))}/s"
    )
