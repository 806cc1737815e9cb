"""Downloads a model from where its weights are kept: the Hugging Face hub, or S3.  No torch.

snapshot    a source's folder: versions, lock, what is complete and current
selection   which of the remote files make the checkpoint (pure)
fetch       one file: resumed, verified, renamed
remote      what a place must be able to do
hub, s3     the two places
"""

from kerf_runtime.models.download.fetch import Retry
from kerf_runtime.models.download.meter import Progress, Transfer
from kerf_runtime.models.download.snapshot import Downloaded, download

__all__ = ["Downloaded", "Progress", "Retry", "Transfer", "download"]
