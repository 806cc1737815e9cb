"""The container images: built from the Dockerfile, cached by content, handed to the local node.

``python -m hack.images`` builds them with buildah, and first a base image of the machine's own
where no registry is reachable.  Every tag is made from the content that went in, so an image whose
tag exists is never built again, and a changed line of code gives a new tag.  With Docker at hand,
``docker build --target runtime .`` reads the same Dockerfile.
"""

from hack.images.builder import Builder
from hack.images.project import Images, build_images

__all__ = ["Builder", "Images", "build_images"]
